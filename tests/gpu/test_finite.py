"""What is not finite, by every kernel on the GPU that is here: in its sequence and head and behind its token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from axes import dispatch
from axes.errors import NotFiniteError
from axes.kernels import contain
from axes.routes.kernel_terms import own_bonus
from axes.sequence import ALL, PREDICTED, GatedDeltaNet
from axes.testing.examples import example
from tests.spoilt import check, chosen, contained, spoilt

SYSTEMS = {cls.name: cls for cls in (*ALL, *PREDICTED)}
LENGTH, AT, REACH = 400, 300, 128  # no kernel takes more tokens together


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SYSTEMS)
def test_it_stays_behind_its_token_or_else_in_its_chunk(name: str, dtype: torch.dtype) -> None:
    update = SYSTEMS[name].update
    given, named = spoilt(update, LENGTH, AT, 64, dtype)
    given = {n: x.cuda() for n, x in given.items()}
    choice = chosen(update, given, "cuda")
    mended = contained(update, choice)
    if choice.implementation != "triton" and not mended:
        pytest.skip("no kernel of ours")
    out, _ = dispatch.run(update, given)
    reach = AT if choice.route == "attention" else AT % REACH  # torch's own blocks are of any length
    check(out, AT, named, reach, (1e-3 if dtype == torch.float32 else 2e-2) if mended else 0.0)


def test_a_bonus_of_all_tokens() -> None:
    """Its kernel reads ahead of a token."""
    update = SYSTEMS["rwkv6"].update
    given, named = spoilt(update, LENGTH, AT, 64, torch.bfloat16)
    some = [i for i, (n, _) in enumerate(named) if n != "bonus"]
    given = {n: x[some].cuda() for n, x in given.items()}
    given["bonus"] = given["bonus"][0, 0].expand(given["bonus"].shape)
    assert own_bonus(update, given) is not None
    check(dispatch.run(update, given)[0], AT, [named[i] for i in some], AT % REACH, 2e-2)


@pytest.mark.parametrize("name", SYSTEMS)
def test_layers_that_were_seen_before_keep_it_behind_its_token(name: str) -> None:
    """From the third call on a line of what was launched is followed, the remedy included."""
    update = SYSTEMS[name].update
    if not contained(update, chosen(update, spoilt(update, 8, 0, 64, torch.bfloat16)[0], "cuda")):
        pytest.skip("no kernel makes its chunks again")
    torch.manual_seed(0)
    layer = SYSTEMS[name](128, heads=2, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, LENGTH, 128, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        whole, _ = layer(x)
        x[0, AT] = math.nan
        for call in range(3):
            y, _ = layer(x)
            assert torch.equal(y[1], whole[1]), (call, "another sequence")
            assert not y[0, AT].isfinite().any(), (call, "swallowed")
            assert torch.equal(y[0, :AT].isfinite(), whole[0, :AT].isfinite()), (call, "an earlier token")
            torch.testing.assert_close(y[0, :AT], whole[0, :AT], rtol=0, atol=2e-2 * float(whole[0, :AT].abs().max()))


@pytest.mark.filterwarnings("ignore:TensorFloat32")  # the compiler's advice
@pytest.mark.parametrize("name", ["softmax-attention", "gqa", "sliding-window", "mla", "ttt-mlp"])
def test_compiled_layers_keep_it_behind_its_token(name: str) -> None:
    torch.manual_seed(0)
    layer = torch.compile(SYSTEMS[name](128, heads=2, device="cuda", dtype=torch.bfloat16), fullgraph=True)
    x = torch.randn(2, LENGTH, 128, device="cuda", dtype=torch.bfloat16)
    for graph in (torch.no_grad, torch.enable_grad):
        bad = x.clone()
        bad[0, AT] = math.nan
        with graph():
            whole, y = (layer(z)[0].detach() for z in (x, bad))
        assert torch.equal(y[1], whole[1]) and y[0, :AT].isfinite().all() and not y[0, AT].isfinite().any()
        torch.testing.assert_close(y[0, :AT], whole[0, :AT], rtol=0, atol=2e-2 * float(whole[0, :AT].abs().max()))


CHAINS = ("linear-attention", "retnet", "mamba2", "delta-net", "gated-delta-net", "gla", "kda", "rwkv7")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CHAINS)
def test_contained_it_reaches_no_earlier_token(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the chunk's kernel gives it to them; what is finite stays bit for bit, what follows is the recurrence's."""
    update = SYSTEMS[name].update
    made = example(update, batch=(2, 2), length=LENGTH, d_k=64, d_v=64, dtype=torch.float32)
    signal = {n: x.movedim(2, 1).contiguous().cuda() for n, x in made.items() if isinstance(x, Tensor)}
    signal |= {n: signal[n].to(dtype) for n in "qkv"}
    with monkeypatch.context() as without:
        without.setattr(contain, "PICKED", False)
        whole, last = dispatch.run(update, signal)
    again, same = dispatch.run(update, signal)
    assert torch.equal(again, whole) and torch.equal(same.theta[0], last.theta[0])
    for n in signal:
        for value in (math.nan, math.inf) if n in "kv" else (math.nan,):
            spoilt = signal[n].clone()
            spoilt[0, AT, 0].view(-1)[0] = value
            given = {**signal, n: spoilt}
            out, _ = dispatch.run(update, given)
            meant, _ = dispatch.run(update, {m: x.double() for m, x in given.items()}, implementation="reference")
            assert torch.equal(out[1], whole[1]) and torch.equal(out[0, :, 1], whole[0, :, 1]), (n, value)
            assert out[0, :AT, 0].isfinite().all(), (n, value, "an earlier token")
            assert torch.equal(out[0, AT:, 0].isfinite(), meant[0, AT:, 0].isfinite()), (n, value, "later ones")
            # rows of the example are of very different lengths, and a product in bfloat16 rounds a sum by its largest
            loose = 3e-2 if dtype == torch.float32 else max(3e-2, 1e-2 * float(whole[0, :AT, 0].abs().max()))
            torch.testing.assert_close(out[0, :AT, 0], whole[0, :AT, 0], rtol=3e-2, atol=loose)


def test_check_finite_reads_a_gpu_too() -> None:
    layer = GatedDeltaNet(128, heads=2, check_finite=True, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, 64, 128, device="cuda", dtype=torch.bfloat16)
    layer(x)
    x[1, 7, 0] = math.nan
    with pytest.raises(NotFiniteError, match="token 7"):
        layer(x)
