"""A model before and after `accelerate()`: the same loss, tokens a second of its training steps.

    python examples/accelerate_a_model.py                      # a small Qwen3-Next of transformers, on a CPU
    python examples/accelerate_a_model.py --device cuda        # width 1,024, 8 layers, 4 x 4,096 tokens, bfloat16
    python examples/accelerate_a_model.py --device cuda --model delta-net       # flash-linear-attention's own DeltaNet

Theirs tune themselves for minutes: `--configurations 3` has each of their kernels try three. On Hopper with Triton 3.4
to 3.7.0 they refuse their own gated backward; `--lift-guard` runs it.

What `before` runs is what transformers finds: flash-linear-attention's kernels where they are installed, its own torch
functions where not. Random weights; the experts are one network, so that the linear layers are what differs.
"""

import argparse
import contextlib
import statistics
import time
import warnings

import torch

from axes.bench import peers
from axes.integrations.fla import accelerate

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--device", default="cpu")
parser.add_argument("--model", choices=("qwen3-next", "delta-net"), default="qwen3-next")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--configurations", type=int, default=0, help="of each of their kernels; 0: all")
parser.add_argument("--lift-guard", action="store_true")
chosen = parser.parse_args()
gpu = torch.device(chosen.device).type == "cuda"
width, layers, batch, length, head = (1024, 8, 4, 4096, 128) if gpu else (64, 4, 1, 256, 16)
dtype = torch.bfloat16 if gpu else torch.float32


def qwen3_next() -> torch.nn.Module:
    import transformers.models.qwen3_next.modeling_qwen3_next as qwen
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        vocab_size=8192, hidden_size=width, num_hidden_layers=layers, intermediate_size=3 * width,
        num_attention_heads=width // head, num_key_value_heads=2, head_dim=head,
        linear_num_key_heads=width // head, linear_num_value_heads=width // head,
        linear_key_head_dim=head, linear_value_head_dim=head, mlp_only_layers=list(range(layers)), num_experts=2,
    )  # fmt: skip
    return qwen.Qwen3NextForCausalLM(config)


def delta_net() -> torch.nn.Module:
    if not gpu:
        raise SystemExit("flash-linear-attention's models run on a GPU alone: give --device cuda")
    from fla.models import DeltaNetConfig, DeltaNetForCausalLM

    config = DeltaNetConfig(
        vocab_size=8192, hidden_size=width, num_hidden_layers=layers, intermediate_size=3 * width,
        num_heads=width // head,
    )  # fmt: skip
    made: torch.nn.Module = DeltaNetForCausalLM(config)
    return made


torch.manual_seed(0)
model = (qwen3_next if chosen.model == "qwen3-next" else delta_net)().to(chosen.device, dtype)
tokens = torch.randint(0, 8192, (batch, length), device=chosen.device)


def step() -> float:
    model.zero_grad(set_to_none=True)
    loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.item()  # waits for the device


def measured() -> tuple[float, float, torch.Tensor]:
    """Loss, tokens a second, and the gradient of the embedding."""
    for _ in range(2):
        loss = step()
    times = []
    for _ in range(chosen.steps):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    grad = model.get_input_embeddings().weight.grad
    assert grad is not None
    return loss, batch * length / statistics.median(times), grad.double()


if __name__ == "__main__":
    warnings.simplefilter("ignore", UserWarning)
    with peers.tuned(chosen.configurations), peers.lifted_guard() if chosen.lift_guard else contextlib.nullcontext():
        before, speed, grad = measured()
    with accelerate(None if gpu else "torch") as ours:
        after, faster, grad_after = measured()
    print(ours)
    apart = (grad_after - grad).norm() / grad.norm()
    print(f"loss {before:.6f} before, {after:.6f} after; gradients differ by {apart:.1e}")
    print(f"tokens a second, with backward: {speed:,.0f} before, {faster:,.0f} after, {faster / speed:.2f} times")
