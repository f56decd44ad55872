"""Mixers as torch modules: factories, dtypes, autocast, state dicts, errors, parameter groups."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from axes.core.state_update import State, StateUpdate
from axes.depth import (
    ALL,
    MHC,
    AttentionResiduals,
    BlockAttentionResiduals,
    DeepDelta,
    DenseFormer,
    DepthMixer,
    DynamicDense,
    FracConnections,
    HyperConnections,
    JPmHC,
    JPmHCMeanPreserving,
    Mixed,
    PostNorm,
    PreNorm,
    Residual,
    ResidualMatrix,
    UniversalTransformer,
)
from axes.depth.base import Streams
from axes.depth.kernels import normalises
from axes.errors import IllegalUpdate, ShapeError
from axes.routes.choice import NoImplementation
from axes.testing.checks import mutations
from tests.drawn import drawn

D = 8
MANY = tuple(cls for cls in ALL if list(cls(D).parameters()))
# a State (a list, or streams with a count) stays as wide as the computation; what keeps outputs apart has a place for
# each of them
TENSORS = tuple(cls for cls in ALL if cls not in (AttentionResiduals, UniversalTransformer))
APART = (
    FracConnections, ResidualMatrix, AttentionResiduals, BlockAttentionResiduals, DenseFormer, DynamicDense, DeepDelta,
)  # fmt: skip
HYPER = tuple(cls for cls in MANY if cls not in APART)


def one_pass(m: DepthMixer, h: torch.Tensor) -> torch.Tensor:
    x = m.expand(h)
    seen, coefficients = m.read(x)
    return values(m.write(x, torch.tanh(seen), coefficients))


def values(streams: Streams) -> torch.Tensor:
    """The streams, or the values of a list."""
    if not isinstance(streams, State):
        return streams
    return streams.theta[1] if len(streams.theta) > 1 else streams.theta[0].mT


def unequal(m: DepthMixer, h: torch.Tensor) -> Streams:
    """Streams that are no copies of each other."""
    x = m.expand(h)
    return x if isinstance(x, State) else x * (1 + 0.1 * torch.arange(x.shape[-2], dtype=x.dtype)[:, None])


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.name)
def test_the_declaration_is_complete(cls: type[DepthMixer]) -> None:
    m = cls(D, layer_index=2)
    assert isinstance(cls.update, StateUpdate) and m.update == cls.update
    assert cls.name == cls.name.lower() and " " not in cls.name
    assert cls.paper and cls.equation and cls.differs and cls.bibtex.startswith("@")
    assert m.prenorm is not normalises(m.update) and m.prenorm is (cls not in (PreNorm, PostNorm, UniversalTransformer))
    assert f"d_model={D}, layer_index=2, streams={m.streams}" in repr(m)
    assert "__final__" in vars(cls)


def test_names_are_unique() -> None:
    assert len({cls.name for cls in ALL}) == len(ALL)


@pytest.mark.parametrize("cls", TENSORS, ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_device_and_dtype(cls: type[DepthMixer], dtype: torch.dtype) -> None:
    m = cls(D, device="cpu", dtype=dtype)
    assert all(p.dtype == dtype and p.device.type == "cpu" for p in m.parameters())
    h = torch.randn(2, 3, D, dtype=dtype)
    x = one_pass(m, h)
    assert (
        x.dtype == dtype
        and x.shape == (2, 3, m.streams * m.fractions, D // m.fractions)
        and m.reduce(x).shape == h.shape
    )
    assert m.read(x)[0].dtype == m.reduce(x).dtype == dtype
    meta = cls(D, device="meta", dtype=dtype)
    assert all(p.device.type == "meta" for p in meta.parameters())


@pytest.mark.parametrize("cls", [c for c in MANY if c in TENSORS], ids=lambda c: c.name)
def test_mixed_precision(cls: type[DepthMixer]) -> None:
    """Streams and parameters need not agree: float32 at least, the wider of the two, result in the streams' dtype."""
    h = torch.randn(2, 3, D, dtype=torch.float64)
    narrow, wide = cls(D, 1), cls(D, 1, dtype=torch.float64)
    with torch.no_grad():
        for p, q in zip(narrow.parameters(), wide.parameters(), strict=True):
            p.normal_()
            q.copy_(p)
    exact = one_pass(wide, h)
    torch.testing.assert_close(one_pass(narrow, h), exact, rtol=0, atol=1e-12)
    assert one_pass(wide, h.float()).dtype == torch.float32
    torch.testing.assert_close(one_pass(narrow, h.float()).double(), exact, rtol=1e-4, atol=1e-4)
    # one ulp of bfloat16 per rounding: entry, what is read, y, result
    torch.testing.assert_close(one_pass(narrow, h.bfloat16()).double(), exact, rtol=5e-2, atol=8e-2)


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.name)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_leaves_coefficients_and_mixing_alone(cls: type[DepthMixer], low: torch.dtype) -> None:
    m = cls(D, 1)
    with torch.no_grad():
        for p in m.parameters():
            p.normal_()
    x, y = unequal(m, torch.randn(2, 3, D)), torch.randn(2, 3, D)
    seen, coefficients = m.read(x)
    new, out = values(m.write(x, y, coefficients)), m.reduce(x)
    with torch.autocast("cpu", dtype=low):
        seen_cast, coefficients_cast = m.read(x)
        new_cast, out_cast = values(m.write(x, y, coefficients_cast)), m.reduce(x)
        written = m.write(x, y.to(low), coefficients_cast)
        (m.read(written)[0].sum() + values(written).sum()).backward() if list(m.parameters()) else None
    assert torch.equal(seen, seen_cast) and torch.equal(new, new_cast) and torch.equal(out, out_cast)
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in m.parameters())


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.name)
def test_state_dict_reset_copy_and_pickle(cls: type[DepthMixer]) -> None:
    m, other = cls(D, 1, dtype=torch.float64), cls(D, 1, dtype=torch.float64)
    fresh = {name: p.clone() for name, p in m.state_dict().items()}
    with torch.no_grad():
        for p in m.parameters():
            p.normal_()
    h = torch.randn(2, D, dtype=torch.float64)
    other.load_state_dict(m.state_dict())
    for twin in (other, copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(one_pass(m, h), one_pass(twin, h))
    m.reset_parameters()
    assert all(torch.equal(p, fresh[name]) for name, p in m.state_dict().items())
    assert all(torch.isfinite(p).all() for p in m.parameters())


@pytest.mark.parametrize("cls", HYPER, ids=lambda c: c.name)
def test_static_and_dynamic_parameters_are_a_partition(cls: type[DepthMixer]) -> None:
    m = cls(D)
    static, dynamic = list(m.static_parameters()), list(m.dynamic_parameters())
    assert {id(p) for p in static} | {id(p) for p in dynamic} == {id(p) for p in m.parameters()}
    assert len(static) + len(dynamic) == len(list(m.parameters()))
    assert all(not p.any() for p in dynamic)  # projections start at zero: decay pulls to the start
    assert bool(dynamic) is (cls is not HyperConnections)


@pytest.mark.parametrize("streams", [2, 3, 5, 7])
@pytest.mark.parametrize("cls", HYPER, ids=lambda c: c.name)
def test_any_number_of_streams(cls: type[DepthMixer], streams: int) -> None:
    if cls is JPmHCMeanPreserving and streams == 2:
        with pytest.raises(ShapeError, match="at least 3"):
            cls(D, 1, streams)
        return
    m = cls(D, 3, streams, dtype=torch.float64)
    h = torch.randn(2, 3, D, dtype=torch.float64)
    torch.testing.assert_close(one_pass(m, h), m.expand(h + torch.tanh(h)), rtol=0, atol=1e-12)


def test_leading_dimensions_are_free_and_tokens_do_not_mix() -> None:
    m = MHC(D, 1, dtype=torch.float64)
    nn.init.normal_(m.phi)
    h = torch.randn(2, 3, D, dtype=torch.float64)
    torch.testing.assert_close(one_pass(m, h[1, 2]), one_pass(m, h)[1, 2], rtol=0, atol=1e-14)
    assert one_pass(m, h[:, :0]).shape == (2, 0, 4, D)


def test_double_backward() -> None:
    for cls in ALL:
        m = cls(4, 1, dtype=torch.float64)
        with torch.no_grad():
            for p in m.parameters():
                p.normal_()
        h = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(4, dtype=torch.float64)

        def loss(h: torch.Tensor, m: DepthMixer = m, w: torch.Tensor = weight) -> torch.Tensor:
            x = unequal(m, h)
            seen, coefficients = m.read(x)
            x = m.write(x, torch.tanh(seen), coefficients)
            return (m.read(x)[0] * w).sum() + values(x).sin().sum()

        assert torch.autograd.gradcheck(loss, h) and torch.autograd.gradgradcheck(loss, h)


@pytest.mark.parametrize("cls", drawn(ALL, 4), ids=lambda c: c.name)
def test_compiled_and_checkpointed(cls: type[DepthMixer]) -> None:
    m = cls(D, 1)
    with torch.no_grad():
        for p in m.parameters():
            p.normal_()
    h = torch.randn(2, 3, D, requires_grad=True)
    weight = torch.randn_like(one_pass(m, h))

    def loss(h: torch.Tensor) -> torch.Tensor:
        return (one_pass(m, h) * weight).sum()

    value, gradient = loss(h), torch.autograd.grad(loss(h), h)[0]
    kept = checkpoint(loss, h, use_reentrant=False)
    assert torch.equal(kept, value) and torch.equal(torch.autograd.grad(kept, h)[0], gradient)
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)(h)
    torch.testing.assert_close(compiled, value)
    torch.testing.assert_close(torch.autograd.grad(compiled, h)[0], gradient)


def test_learned_reduce_starts_at_the_mean_and_learns() -> None:
    m = MHC(D, 0, learned_reduce=True, dtype=torch.float64)
    x = torch.randn(2, 3, 4, D, dtype=torch.float64)
    torch.testing.assert_close(m.reduce(x), x.mean(-2), rtol=0, atol=1e-14)
    (m.reduce(x) * torch.randn(2, 3, D, dtype=torch.float64)).sum().backward()
    assert m.exit is not None and m.exit.grad is not None and bool((m.exit.grad != 0).all())
    assert any(p is m.exit for p in m.static_parameters())
    with pytest.raises(ShapeError, match="no effect on one stream"):
        HyperConnections(D, streams=1, learned_reduce=True)


class Extras(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, str]:
        return scale * x * mask, "cache"


def test_mixed_hands_arguments_and_further_outputs_through() -> None:
    block, plain = Mixed(Extras(), MHC(D, 1)), Mixed(nn.Tanh(), Residual(D))
    h = torch.randn(2, 3, D)
    streams, cache = block(block.mixer.expand(h), torch.zeros(3, 1), scale=2.0)
    assert cache == "cache"
    torch.testing.assert_close(streams, block.mixer.expand(h), rtol=0, atol=1e-6)
    torch.testing.assert_close(plain(plain.mixer.expand(h)), (h + torch.tanh(h))[..., None, :], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MHC(0), "MHC: d_model must be an integer >= 1, got 0"),
        (lambda: MHC(D, -1), "layer_index must be an integer >= 0"),
        (lambda: MHC(D, 0, 1), "streams must be at least 2, got 1"),
        (lambda: HyperConnections(D, 0, 0), "streams must be an integer >= 1"),
        (lambda: MHC(D, dtype=torch.int64), "dtype must be floating point"),
        (lambda: JPmHC(D, 0, 5, method="closed"), "takes at most 4 streams, got 5"),
        (lambda: JPmHC(D, method="lu"), "method must be 'closed', 'solve' or None"),
        (lambda: MHC(D).expand(torch.zeros(2, 3, D + 1)), "MHC.expand: hidden must be (B, T, d) with d = 8, got (2,"),
        (lambda: MHC(D).expand([1.0]), "hidden must be a tensor (B, T, d) with d = 8, got a list"),
        (
            lambda: MHC(D).read(torch.zeros(2, 3, D)),
            "MHC.read: streams must be (B, T, n, d) with n = 4, d = 8, got (2, 3, 8): enter with expand(h)",
        ),
        (lambda: MHC(D).read(torch.zeros(2, 3, 2, D)), "with n = 4, d = 8, got (2, 3, 2, 8)"),
        (lambda: MHC(D).read(torch.zeros(2, 3, 4, D, dtype=torch.int64)), "must be floating point, got torch.int64"),
        (lambda: MHC(D, device="meta").read(torch.zeros(1, 4, D)), "streams is on cpu, the mixer on meta"),
        (lambda: MHC(D).reduce(torch.zeros(3, D)), "MHC.reduce: streams must be (B, T, n, d)"),
        (lambda: _write(torch.zeros(2, 3, D + 1)), "MHC.write: y must be (B, T, d) with d = 8, got (2, 3, 9)"),
        (lambda: _write(torch.zeros(2, 1, D)), "y (2, 1, 8) does not fit streams (2, 3, 4, 8)"),
        (lambda: PreNorm(D).read(torch.zeros(2, 3, D)), "with n = 1, d = 8, got (2, 3, 8)"),
    ],
)
def test_errors_name_what_was_given_and_what_is_allowed(call: object, message: str) -> None:
    with pytest.raises(ShapeError) as raised:
        call()  # type: ignore[operator]
    assert message in str(raised.value)


def _write(y: torch.Tensor) -> None:
    m = MHC(D)
    x = torch.zeros(2, 3, 4, D)
    m.write(x, y, m.read(x)[1])


def by(mixer: DepthMixer, who: str | None) -> tuple[torch.Tensor, ...]:
    """x, the new streams, what leaves, and all gradients, by an implementation: of the same numbers every time."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in mixer.double().parameters():
            p.copy_(0.3 * torch.randn_like(p))
    streams = torch.randn(2, 3, mixer.streams, 12, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True)
    mixer.implementation = who  # type: ignore[assignment]
    x, coefficients = mixer.read(streams)
    made = mixer.write(streams, y, coefficients)
    outs = (x, made, mixer.reduce(made))
    total = sum((o * torch.arange(o.numel(), dtype=o.dtype).cos().view(o.shape)).sum() for o in outs)
    leaves = [streams, y, *mixer.parameters()]
    return (*outs, *torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("cls", ALL)
def test_products_are_the_step_of_the_tuple(cls: type[DepthMixer]) -> None:
    """Float64: by products with the streams where `choose` takes them."""
    mixer = cls(12, 1)
    if mixer.plans()[0].choice.implementation == "reference":
        with pytest.raises(NoImplementation, match="no torch form"):
            mixer.plans(implementation="torch")
        return
    for a, b in zip(by(mixer, "reference"), by(mixer, "torch"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("cls", [c for c in ALL if c in TENSORS])
def test_what_runs_is_what_the_tuple_says(cls: type[DepthMixer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Any part of the tuple may be another: a mixer's own short cuts ask for what they need, or this sees it."""
    compared = 0
    for changed, update in mutations(cls.update):
        if not isinstance(update, StateUpdate):
            continue
        monkeypatch.setattr(cls, "update", update)
        try:
            mixer = cls(12, 1)
        except (IllegalUpdate, RuntimeError):  # no meaning along depth, or parameters that are laid out for the tuple
            continue
        try:
            meant = by(mixer, "reference")
        except (IllegalUpdate, ShapeError):  # another number of streams, or a signal that the mixer does not make
            continue
        for a, b in zip(by(mixer, None), meant, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, c=changed: f"{c}: {m}")
        compared += 1
    assert compared or cls in (FracConnections, ResidualMatrix)
