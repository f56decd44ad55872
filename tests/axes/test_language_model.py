"""The language model: shapes, causality, the recurrent form, norms, and one entry per sequence layer in the state."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from axes import catalogue
from axes.depth.base import Streams
from axes.errors import AxesError, ShapeError, UnknownName
from axes.models.language_model import Architecture, Block, LanguageModel, RMSNorm, SwiGLU, state_bytes
from tests.drawn import drawn
from tests.interpreter import interpret

SMALL = {"layers": 2, "width": 32, "heads": 2}
PAIRS = [("gated-delta-net", "mhc"), ("softmax-attention", "residual")]
EVERY = dict.fromkeys(
    [
        *((entry.name, "residual") for entry in catalogue.entries("sequence")),
        *(("gated-delta-net", entry.name) for entry in catalogue.entries("depth")),
    ]
)


def build(sequence: str | tuple[str, ...], depth: str, dtype: torch.dtype = torch.float64) -> LanguageModel:
    torch.manual_seed(0)
    streams = {"denseformer": 5, "dynamic-dense": 5}.get(depth, 4)  # one for each output, and one for what enters
    model = LanguageModel(Architecture(sequence=sequence, depth=depth, streams=streams, **SMALL), dtype=dtype)
    # large enough that predictions differ between positions
    nn.init.normal_(model.head.weight)
    return model


def tokens(batch: int, time: int) -> Tensor:
    return torch.randint(256, (batch, time), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("sequence", "depth"), PAIRS)
def test_logits_and_state(sequence: str, depth: str) -> None:
    model = build(sequence, depth)
    logits, state = model(tokens(3, 11))
    assert logits.shape == (3, 11, 256)
    assert logits.dtype == torch.float64
    assert len(state) == SMALL["layers"]
    assert state_bytes(state) > 0


@pytest.mark.parametrize(("sequence", "depth"), PAIRS)
def test_first_prediction_is_nearly_uniform(sequence: str, depth: str) -> None:
    model = build(sequence, depth)
    model.reset_parameters()
    logits, _ = model(tokens(4, 16))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens(4, 16).flatten())
    assert abs(loss.item() / math.log(2.0) - 8.0) < 0.2


@pytest.mark.parametrize(("sequence", "depth"), EVERY)
def test_no_output_depends_on_a_later_token(sequence: str, depth: str) -> None:
    model = build(sequence, depth)
    window = tokens(1, 12)
    changed = window.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    difference = (model(window)[0] - model(changed)[0]).detach().abs().amax(dim=(0, 2))
    assert float(difference[:7].max()) == 0.0
    assert float(difference[7:].max()) > 1e-6


@pytest.mark.parametrize(("sequence", "depth"), drawn(EVERY, 4))
def test_step_agrees_with_forward(sequence: str, depth: str) -> None:
    model = build(sequence, depth)
    window = tokens(2, 19)
    parallel, final = model(window)
    state = None
    for position in range(window.shape[1]):
        logits, state = model.step(window[:, position], state)
        torch.testing.assert_close(logits, parallel[:, position], rtol=1e-9, atol=1e-9)
    # the state of one form continues in the other
    more = tokens(2, 23)[:, 19:]
    torch.testing.assert_close(model(more, state)[0], model(more, final)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("sequence", "depth"), PAIRS)
def test_every_parameter_is_trained(sequence: str, depth: str) -> None:
    model = build(sequence, depth)
    model(tokens(2, 9))[0].square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_memory_of_a_recurrence_does_not_grow_and_that_of_a_list_does() -> None:
    def sizes(sequence: str) -> tuple[int, int]:
        model = build(sequence, "residual")
        return state_bytes(model(tokens(1, 8))[1]), state_bytes(model(tokens(1, 64))[1])

    short, long = sizes("gated-delta-net")
    assert short == long
    short, long = sizes("softmax-attention")
    assert long > 4 * short


def test_post_norm_is_not_normalised_twice() -> None:
    model = build("softmax-attention", "post-norm")
    assert all(isinstance(norm, nn.Identity) for norm in [*model.norms, model.norm])
    assert all(isinstance(norm, RMSNorm) for norm in [*build("softmax-attention", "residual").norms])
    assert torch.isfinite(model(tokens(2, 5))[0]).all()


def test_head_is_not_tied() -> None:
    model = build("softmax-attention", "residual")
    assert model.head.weight.data_ptr() != model.embedding.weight.data_ptr()


def test_same_seed_same_model() -> None:
    first, second = build("gated-delta-net", "mhc"), build("gated-delta-net", "mhc")
    for left, right in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right)


HYBRID = ("gated-delta-net", "softmax-attention")


def test_every_layer_may_have_a_name_of_its_own() -> None:
    model = build(HYBRID, "mhc")
    assert [type(layer).name for layer in model.sublayers[::2]] == list(HYBRID)
    alike = build("gated-delta-net", "mhc")
    listed = build(("gated-delta-net",) * 2, "mhc")
    listed.load_state_dict(alike.state_dict())
    assert torch.equal(listed(tokens(2, 9))[0], alike(tokens(2, 9))[0])


@pytest.mark.parametrize("sequence", ["gated-delta-net", HYBRID])
def test_no_layer_sees_what_is_masked(sequence: str | tuple[str, ...]) -> None:
    model, window = build(sequence, "mhc"), tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :4] = False
    hidden, state = model.hidden(model.embedding(window), mask=mask)
    for row, first in enumerate((4, 0)):
        alone, after = model.hidden(model.embedding(window[row : row + 1, first:]))
        torch.testing.assert_close(hidden[row : row + 1, first:], alone, rtol=1e-9, atol=1e-9)
    more = model.embedding(tokens(2, 12)[:, 9:])
    torch.testing.assert_close(model.hidden(more, state)[0][1:], model.hidden(more[1:], after)[0], rtol=1e-9, atol=1e-9)


def test_packed_sequences_do_not_see_each_other() -> None:
    model, window = build(HYBRID, "mhc"), tokens(1, 9)
    hidden, _ = model.hidden(model.embedding(window), cu_seqlens=torch.tensor([0, 5, 9]))
    for part in (slice(0, 5), slice(5, 9)):
        alone = model.hidden(model.embedding(window[:, part]))[0]
        torch.testing.assert_close(hidden[:, part], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("depth", [entry.name for entry in catalogue.entries("depth")])
def test_blocks_run_one_by_one_are_the_same_model(depth: str) -> None:
    model, x = build("gated-delta-net", depth), torch.randn(2, 5, 32, dtype=torch.float64)
    seen: list[Tensor] = []

    def watched(block: Block, streams: Streams) -> Streams:
        streams = block(streams)
        seen.append(model.mixers[-1].reduce(streams))
        return streams

    hidden = model.hidden(x, around=watched)[0]
    assert len(seen) == 2 and torch.equal(model.norm(seen[-1]), hidden) and not torch.equal(*seen)
    torch.testing.assert_close(hidden, model.hidden(x)[0], rtol=1e-12, atol=1e-12)


def test_bad_architectures_are_refused() -> None:
    with pytest.raises(AxesError, match="one for each: 2 names are given for 3 layers"):
        Architecture(HYBRID, layers=3)
    with pytest.raises(UnknownName, match="did you mean softmax-attention"):
        Architecture(("gated-delta-net", "softmax"), layers=2)
    with pytest.raises(AxesError, match="3 heads do not divide a width of 32"):
        Architecture(width=32, heads=3)
    with pytest.raises(AxesError, match="layers must be at least 1, got 0"):
        Architecture(layers=0)
    with pytest.raises(UnknownName, match="did you mean gated-delta-net"):
        Architecture(sequence="gated-deltanet")
    with pytest.raises(UnknownName, match="mhc"):
        Architecture(depth="mch")


def test_bad_inputs_are_refused() -> None:
    model = build("softmax-attention", "residual")
    with pytest.raises(ShapeError, match=r"\(B, T\)"):
        model(torch.zeros(5, dtype=torch.long))
    with pytest.raises(ShapeError, match=r"\(B,\)"):
        model.step(torch.zeros(5, 1, dtype=torch.long))
    with pytest.raises(ShapeError, match="holds 1 layers, not 2"):
        model(tokens(1, 3), (None,))


SWIGLU = """
import torch
from axes.models.language_model import SwiGLU
torch.manual_seed(0)
for width, dtype, close in ((24, torch.float32, 1e-5), (128, torch.float16, 3e-3)):
    one = SwiGLU(width, dtype=dtype)
    assert one.no_kernel(torch.device("cpu"), dtype) is None
    exact = SwiGLU(width, dtype=torch.float64)
    exact.load_state_dict(one.state_dict())
    x = torch.randn(2, 3, width).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    assert exact.no_kernel(torch.device("cpu"), torch.float64) is not None
    pairs = [(one(x), exact(wide))]
    dy = torch.randn(2, 3, width).to(dtype)
    pairs += zip(
        torch.autograd.grad(pairs[0][0], (x, *one.parameters()), dy),
        torch.autograd.grad(pairs[0][1], (wide, *exact.parameters()), dy.double()),
    )
    for got, wanted in pairs:
        assert got.dtype == dtype and (got - wanted).norm() <= close * wanted.norm()
"""


def test_the_gated_network_by_kernels() -> None:
    interpret(SWIGLU)


def test_a_gated_network_whose_projection_was_replaced_runs_it() -> None:
    network = SwiGLU(8)
    network.gate = nn.Sequential(network.gate)
    assert "not a plain nn.Linear" in (network.no_kernel(torch.device("cuda"), torch.float32) or "")
    assert network(torch.randn(2, 3, 8)).shape == (2, 3, 8)
