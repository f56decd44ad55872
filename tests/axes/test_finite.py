"""What is not finite stays in its sequence and head and behind its token, by every route; and is told if asked for."""

from __future__ import annotations

import math
import re
import sys

import pytest
import torch
from torch import Tensor

from axes import dispatch
from axes.core.costs import Huber, HuberSwitch, Lp
from axes.core.geometry import InverseRoot, Spectral, Whiten
from axes.core.geometry.bregman import Context
from axes.errors import AxesError, NotFiniteError
from axes.routes import attention, finite, scan
from axes.sequence import ALL, PREDICTED, GatedDeltaNet, SoftmaxAttention, YaadMatrix
from axes.testing.examples import example, leaves
from tests.interpreter import interpret

SYSTEMS = {cls.name: cls for cls in (*ALL, *PREDICTED)}
LENGTH, AT, D = 20, 9, 4
CLIPPED = {"yaad-matrix", "yaad", "yaad-switch"}  # costs that clip an infinite value


def _signal(name: str) -> dict[str, Tensor | float]:
    """(B, T, H, ...) in float64."""
    made = example(SYSTEMS[name].update, batch=(2, 2), length=LENGTH, d_k=D, d_v=D)
    return {n: x.movedim(2, 1).contiguous() if isinstance(x, Tensor) else x for n, x in made.items()}


def _spoilt(x: Tensor, value: float) -> Tensor:
    """One entry of one token of the first head of the first sequence."""
    x = x.clone()
    x[0, AT, 0].view(-1)[0] = value
    return x


def _unlike(a: Tensor, b: Tensor) -> Tensor:
    """Where a is not b, beyond rounding."""
    return ~((a - b).abs() <= 1e-7 * (1 + b.abs().max()))


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_token_that_is_not_finite_reaches_no_earlier_one_no_other_sequence_and_no_other_head(name: str) -> None:
    update, signal = SYSTEMS[name].update, _signal(name)
    gates = finite.log_gates(update)
    whole, last = dispatch.run(update, signal)
    for n, x in signal.items():
        if not isinstance(x, Tensor):
            continue
        for value in (math.nan, math.inf) if n in ("v", "delta") else (math.nan,):
            out, state = dispatch.run(update, {**signal, n: _spoilt(x, value)})
            unlike = _unlike(out, whole)
            assert not unlike[0, :AT].any(), (n, value, "an earlier token")
            assert not unlike[1].any() and not unlike[0, :, 1].any(), (n, value, "another sequence or head")
            for got, want in zip(leaves(state), leaves(last), strict=True):
                if got.shape[:2] == (2, 2):
                    other = _unlike(got, want).flatten(2).any(-1)
                    assert not other[1].any() and not other[0, 1], (n, value, "the state of another")
            swallowed = bool(out[0, AT:, 0].isfinite().all())
            assert swallowed == (value == math.inf and name in CLIPPED and n in ("v", "delta")), (n, value)
    for gate in sorted(gates)[:1]:  # nothing is left of what was before; the log of zero is no accident
        out, _ = dispatch.run(update, {**signal, gate: _spoilt(signal[gate], -math.inf)})  # type: ignore[arg-type]
        assert out.isfinite().all()


@pytest.mark.parametrize("name", ["gated-delta-net", "ttt-linear", "lattice-sim", "rope", "titans"])
def test_what_follows_is_what_the_interpreter_says(name: str) -> None:
    """In the other entries of a state of which one is lost too; with a second such token, and after an overflow."""
    update, signal = SYSTEMS[name].update, _signal(name)
    v = signal["v"]
    assert isinstance(v, Tensor)
    v = _spoilt(v, math.inf)
    v[0, AT + 5, 0, -1] = math.nan
    v[1, AT + 3, 1] = 1e300
    given = {**signal, "v": v}
    by_route, meant = dispatch.run(update, given), dispatch.run(update, given, implementation="reference")
    for got, want in zip(leaves(by_route), leaves(meant), strict=True):
        assert torch.equal(got.isfinite(), want.isfinite())
        torch.testing.assert_close(got.nan_to_num(0, 0, 0), want.nan_to_num(0, 0, 0), rtol=1e-6, atol=1e-8)


def test_gradients_of_earlier_tokens_stay() -> None:
    """Of a loss that reads no token from the spoilt one on, in what came before it."""
    signal = _signal("mamba2")
    signal["v"] = _spoilt(signal["v"], math.nan).requires_grad_()  # type: ignore[arg-type]
    out, _ = dispatch.run(SYSTEMS["mamba2"].update, signal)
    assert out[1].isfinite().all() and out[0, :AT].isfinite().all()
    (grad,) = torch.autograd.grad(out[1].sum(), signal["v"])  # type: ignore[arg-type]
    assert grad[1].isfinite().all() and (grad[1] != 0).any()


def test_packed_sequences() -> None:
    cls = GatedDeltaNet
    signal = {n: x[:1] if isinstance(x, Tensor) else x for n, x in _signal(cls.name).items()}
    cu = torch.tensor([0, 5, 12, LENGTH])
    state = cls.update.init({n: x[0, :3] for n, x in signal.items() if isinstance(x, Tensor)})
    whole, _ = dispatch.run_packed(cls.update, signal, state, cu)
    out, after = dispatch.run_packed(cls.update, {**signal, "k": _spoilt(signal["k"], math.nan)}, state, cu)  # type: ignore[arg-type]
    unlike = _unlike(out, whole)[0]
    assert not unlike[:AT].any() and not unlike[12:].any() and unlike[AT:12, 0].all()
    assert after is not None and after.theta[0][[0, 2]].isfinite().all()


@pytest.mark.parametrize("name", SYSTEMS)
def test_where_nobody_may_look_zeros_stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in graphs: earlier tokens, heads and sequences are as they were, memories say it."""
    signal = _signal(name)
    monkeypatch.setattr(finite, "_may_look", lambda x: False)
    update = SYSTEMS[name].update
    whole, _ = dispatch.run(update, signal)
    for n, x in signal.items():
        if not isinstance(x, Tensor):
            continue
        out, after = dispatch.run(update, {**signal, n: _spoilt(x, math.nan)})
        unlike = _unlike(out, whole)
        assert not unlike[1].any() and not unlike[0, :, 1].any() and not unlike[0, :AT].any(), n
        until = AT + 1 if n == "q" else LENGTH  # of a query no memory hears
        assert out[0, AT : AT + 2, 0].isnan().any(), n  # some read what was there before a token's gate
        assert not unlike[0, until:].any(), n
        assert not any(x[1].isnan().any() or x[0, 1].isnan().any() for x in after.theta), n
        assert n in ("q", "bonus") or all(x[0, 0].isnan().all() for x in after.theta if x.is_floating_point()), n


@pytest.mark.parametrize("name", ["ttt-mlp", "mamba2"])
def test_zeros_stand_in_on_every_device(name: str) -> None:
    """Where a look would wait for it, which a device without numbers stands for."""
    signal = {n: x.movedim(1, 2).to("meta") for n, x in _signal(name).items() if isinstance(x, Tensor)}
    update, given = SYSTEMS[name].update, []
    state = update.init({n: x[:, :, 0] for n, x in signal.items()})

    def route(update: object, signal: dict[str, Tensor], state: object) -> tuple[Tensor, object]:
        given.append(signal)
        return signal["v"], state

    finite.contained(route, update, signal, state, 2)  # type: ignore[arg-type]
    assert given[0]["v"] is not signal["v"]


def test_which_lists_a_kernel_reads_again_behind_torch() -> None:
    lists = {n: cls.update for n, cls in SYSTEMS.items() if cls.update.parts().memory.kind == "list"}

    def read(dtype: torch.dtype, d_k: int) -> set[str]:
        given = {n: example(u, batch=(1, 1), length=2, d_k=d_k, dtype=dtype) for n, u in lists.items()}
        return {n for n, u in lists.items() if attention.reads_again(u, given[n])}

    assert read(torch.float32, 256) == {"softmax-attention", "rope", "gqa", "mqa", "mla", "sliding-window"}
    assert not read(torch.float64, 256) and not read(torch.float32, 258)


@pytest.mark.parametrize("at", [5, 15, 16, 33])
@pytest.mark.parametrize("name", ["ttt-mlp", "titans", "yaad", "memora"])
def test_zeros_stand_in_for_two_layers(name: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every place of a block between anchors, and behind a state that stands inside of one; the next call goes on
    with what is lost."""
    update = SYSTEMS[name].update
    made = example(update, batch=(2, 2), length=40, d_k=D, d_v=D)
    signal = {n: x.movedim(2, 1).contiguous() for n, x in made.items() if isinstance(x, Tensor)}
    parts = [{n: x[:, i:j] for n, x in signal.items()} for i, j in ((0, 3), (3, 40))]
    monkeypatch.setattr(finite, "_may_look", lambda x: False)
    _, state = dispatch.run(update, parts[0], implementation="torch")
    whole, last = dispatch.run(update, parts[1], state, implementation="torch")
    for n in ("k", "v"):
        bad = parts[1][n].clone()
        bad[0, at, 0, 0] = math.nan
        out, after = dispatch.run(update, {**parts[1], n: bad}, state, implementation="torch")
        unlike = _unlike(out, whole)
        assert not unlike[1].any() and not unlike[0, :, 1].any() and not unlike[0, :at].any()
        assert out[0, at:, 0].isnan().all()
        later, _ = dispatch.run(update, parts[1], after, implementation="torch")
        fine, _ = dispatch.run(update, parts[1], last, implementation="torch")
        unlike = _unlike(later, fine)
        assert later[0, :, 0].isnan().all() and not unlike[1].any() and not unlike[0, :, 1].any()


@pytest.mark.parametrize("name", SYSTEMS)
def test_layers_keep_it_behind_its_token_and_in_its_sequence(name: str) -> None:
    """Convolutions, norms and projections around the recurrence included."""
    torch.manual_seed(0)
    layer = SYSTEMS[name](8, heads=2, dtype=torch.float64)
    x = torch.randn(2, LENGTH, 8, dtype=torch.float64)
    with torch.no_grad():
        whole, _ = layer(x)
        x[0, AT] = math.nan
        y, _ = layer(x)
    unlike = _unlike(y, whole)
    assert not unlike[1].any() and not unlike[0, :AT].any()
    assert y[0, AT].isnan().all() and y[0, AT:].isnan().any(-1).all()


LARGE = {  # docs/finite.md: the power of ten from which a layer's output is not finite
    **dict.fromkeys(("mamba2", "log-linear-mamba2", "mamba", "rwkv7", "rwkv6", "based"), 8),
    "mlstm": 11,
    "mamba3": 13,
    "mamba3-mimo": 13,
    **dict.fromkeys(("linear-attention", "linear-attention-unnormalised", "retnet", "gla"), 14),
    **dict.fromkeys(("gated-retention", "lightning-attention"), 14),
    **dict.fromkeys(("titans", "ttt-linear", "ttt-mlp", "lattice-dec", "lattice-enc", "lattice-sim", "hgrn2"), 19),
    **dict.fromkeys(("path", "path-fox", "deltaformer", "lucid"), 19),
    **dict.fromkeys(("longhorn", "longhorn-diagonal", "softmax-attention", "alibi", "rope", "fox", "shampoo-net"), 20),
    **dict.fromkeys(("rg-lru", "gqa", "mqa", "mla", "sliding-window", "rebased", "gsa", "abc"), 20),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_how_large_values_may_be(name: str) -> None:
    """As documented, two orders to the safe side. (Beyond 1e19 a norm that overflows may divide everything to zero.)"""
    torch.manual_seed(0)
    layer, x = SYSTEMS[name](16, heads=2), torch.randn(2, 24, 16)
    with torch.no_grad():
        assert layer(x * 10.0 ** (LARGE.get(name, 38) - 2))[0].isfinite().all()
        assert LARGE.get(name, 38) > 14 or not layer(x * 10.0 ** (LARGE[name] + 2))[0].isfinite().all()


def test_nobody_looks_twice_at_what_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sum a call; sums that overflow are not mistaken for entries that are not finite."""
    runs = []
    true = scan.chunked
    monkeypatch.setattr(scan, "chunked", lambda *given: runs.append(1) or true(*given))
    signal = {n: x.float() if isinstance(x, Tensor) else x for n, x in _signal("linear-attention-unnormalised").items()}
    signal["v"] = torch.full_like(signal["v"], 1e37)  # type: ignore[arg-type]
    out, _ = dispatch.run(SYSTEMS["linear-attention-unnormalised"].update, signal)
    assert out.isfinite().all() and not math.isfinite(out.abs().sum()) and len(runs) == 1


KERNELS = r"""
import sys
import torch
from axes import dispatch
from axes.kernels.common import versions
from axes.routes import finite
from axes.routes.attention import softmax
from axes.sequence import ALL, PREDICTED
from tests.spoilt import check, chosen, contained, spoilt

versions.refusal = lambda *given, **named: None
finite._may_look = lambda x: False  # the CPU's own remedy
softmax.may_mend = lambda x: True
LENGTH, AT, D = 44, 40, 16
torch.manual_seed(0)
(update,) = {cls.update for cls in (*ALL, *PREDICTED) if cls.name == NAME}
given, named = spoilt(update, LENGTH, AT, D, torch.float32)
choice = chosen(update, given, "cpu")
if choice.implementation == "triton":
    out, _ = dispatch.run(update, given)
    reach = AT if choice.route == "attention" else AT % 32  # torch's own blocks are of any length
    check(out, AT, named, reach, 1e-3 if contained(update, choice) else 0.0)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's interpreter")
@pytest.mark.parametrize("name", SYSTEMS)
def test_kernels_keep_it_behind_its_token(name: str) -> None:
    """They multiply chunks by masked matrices too: tests/gpu asks the same of the compiled ones, and
    tests/axes/test_kernels_contain.py of each kernel that makes chunks again."""
    interpret(f"NAME = {name!r}\n{KERNELS}")


# ---- parts that swallowed or raised ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", [Huber(), Huber(kind="norm"), HuberSwitch(), Lp(1), Lp(1.5), Lp(3)])
def test_costs_keep_nan(cost: Huber) -> None:
    prediction, target = torch.zeros(3), torch.tensor([1.0, math.nan, 0.0])
    assert cost.gradient(prediction, target)[1].isnan()


def test_decompositions_of_what_is_not_finite_are_nan_and_those_beside_it_are_not() -> None:
    good = torch.tensor([[2.0, 0.5], [0.5, 1.0]])
    a = torch.stack((good, torch.full((2, 2), math.nan), torch.full((2, 2), math.inf)))
    theta = torch.ones(3, 2, 2)
    for made, want in (
        (InverseRoot(0.5).primal(a), InverseRoot(0.5).primal(good)),
        (Spectral("polar").primal(a), Spectral("polar").primal(good)),
        (
            Whiten(("L", "R"), "kronecker", 0.5, 0.1).primal(theta, Context(stats=(a, a))),
            Whiten(("L", "R"), "kronecker", 0.5, 0.1).primal(theta[0], Context(stats=(good, good))),
        ),
    ):
        torch.testing.assert_close(made[0], want)
        assert made[1:].isnan().all()


@pytest.mark.parametrize("name", ["shampoo-net", "rls-net"])
def test_a_ridge_below_the_rounding_of_a_statistic_is_that_rounding(name: str) -> None:
    """At values of 1e4 eigenvalues that are rounding alone, over a ridge of 0.1, were most of the result."""
    signal = {n: x.float() if isinstance(x, Tensor) else x for n, x in _signal(name).items()}
    signal |= {n: 1e4 * signal[n] for n in "kv"}  # type: ignore[dict-item]
    out, _ = dispatch.run(SYSTEMS[name].update, signal)
    want, _ = dispatch.run(SYSTEMS[name].update, signal, implementation="reference")
    exact, _ = dispatch.run(
        SYSTEMS[name].update, {n: x.double() if isinstance(x, Tensor) else x for n, x in signal.items()}
    )
    assert (out - want).abs().max() < 0.05 * exact.abs().max()
    assert out.abs().max() < 2 * exact.abs().max()


def test_where_nobody_may_look_no_token_is_none_that_spoils(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "_may_look", lambda x: False)
    update, signal = SYSTEMS["delta-net"].update, _signal("delta-net")
    moved = {n: x.movedim(1, 2)[:, :, :0] for n, x in signal.items() if isinstance(x, Tensor)}
    state = update.init({n: x.new_zeros(2, 2, D) for n, x in moved.items() if n in "qkv"})
    out, after = finite.contained(lambda u, s, state: (s["v"], state), update, moved, state, 2)  # type: ignore[arg-type,return-value]
    assert out.shape == (2, 2, 0, D) and after is state


# ---- told if asked for -----------------------------------------------------------------------------------------------


def _named(name: str, value: str, sequence: int, head: int, entry: tuple[int, ...], time: int = 1) -> str:
    place = f"at token {entry[time]} of sequence {sequence} and head {head}, entry {entry}"
    return re.escape(f"{name} is not finite: {value} {place}")


@pytest.mark.parametrize("time", [0, 1, 2])
def test_check_finite_names_sequence_head_and_token(time: int) -> None:
    """Of every input and of what overflows, wherever time stands; a constant has none of these."""
    update = SYSTEMS["gated-delta-net"].update
    signal = {n: x.movedim(1, time) for n, x in _signal("gated-delta-net").items() if isinstance(x, Tensor)}
    entry = [1, 1]
    entry.insert(time, AT)
    for n, x in signal.items():
        bad = x.clone()
        bad[tuple(entry)] = math.nan
        where = (*entry, *[0] * (x.ndim - 3))
        with pytest.raises(NotFiniteError, match=_named(n, "nan", 1, 1, where, time)):
            dispatch.run(update, {**signal, n: bad}, time=time, check_finite=True)
    large = {n: x.clone() for n, x in signal.items()}
    large["v"][tuple(entry)], large["q"][tuple(entry)] = 1e200, 1e200
    said = rf"the output is not finite: (nan|-?inf) at token {AT} of sequence 1 and head 1, entry"
    with pytest.raises(NotFiniteError, match=said):
        dispatch.run(update, large, time=time, check_finite=True)


def test_check_finite_of_several_writes_and_of_sequences_without_heads() -> None:
    update = SYSTEMS["delta-product"].update
    signal = _signal("delta-product")
    bad = signal["k"].clone()  # type: ignore[union-attr]
    bad[0, AT, 1, 1, 2] = math.inf
    with pytest.raises(NotFiniteError, match=_named("k", "inf", 0, 1, (0, AT, 1, 1, 2))):
        dispatch.run(update, {**signal, "k": bad}, check_finite=True)
    update = SYSTEMS["linear-attention"].update
    alone = {n: x[:, :, 0].clone() if isinstance(x, Tensor) else x for n, x in _signal("linear-attention").items()}
    alone["v"][1, AT, 2] = math.nan  # type: ignore[index]
    with pytest.raises(NotFiniteError, match=re.escape(f"nan at token {AT} of sequence 1, entry (1, {AT}, 2)")):
        dispatch.run(update, alone, check_finite=True)


def test_a_layer_names_the_head_whose_read_is_not_finite() -> None:
    layer = GatedDeltaNet(8, heads=2, check_finite=True)
    true = layer._recur

    def spoilt(signal: dict[str, Tensor], memory: object) -> tuple[Tensor, object]:
        out, after = true(signal, memory)  # type: ignore[arg-type]
        out = out.clone()
        out[1, AT, 1, 2] = math.inf
        return out, after

    layer._recur = spoilt  # type: ignore[assignment,method-assign]
    with pytest.raises(NotFiniteError, match="GatedDeltaNet: " + _named("what is read", "inf", 1, 1, (1, AT, 1, 2))):
        layer(torch.randn(2, LENGTH, 8))


def test_check_finite_names_the_token() -> None:
    update, signal = YaadMatrix.update, _signal("yaad-matrix")
    given = {**signal, "v": _spoilt(signal["v"], math.inf)}  # type: ignore[arg-type]
    assert dispatch.run(update, given)[0].isfinite().all()  # one more outlier
    with pytest.raises(NotFiniteError, match=_named("v", "inf", 0, 0, (0, AT, 0, 0))):
        dispatch.run(update, given, check_finite=True)
    shut = {**signal, "decay": _spoilt(signal["decay"], -math.inf)}  # type: ignore[arg-type]
    assert dispatch.run(update, shut, check_finite=True)[0].isfinite().all()
    with pytest.raises(NotFiniteError, match="the output is not finite: .* values are too large"):
        dispatch.run(update, {**signal, "k": 1e200 * signal["k"]}, check_finite=True)


def test_check_finite_of_packed_sequences() -> None:
    signal = {n: x[:1] if isinstance(x, Tensor) else x for n, x in _signal("delta-net").items()}
    update = SYSTEMS["delta-net"].update
    state = update.init({n: x[0, :2] for n, x in signal.items() if isinstance(x, Tensor)})
    signal["beta"] = _spoilt(signal["beta"], math.nan)  # type: ignore[arg-type]
    place = f"at token {AT} of the packed ones, {AT - 5} of sequence 1 and head 0, entry (0, {AT}, 0) of"
    with pytest.raises(NotFiniteError, match=re.escape(f"run_packed: beta is not finite: nan {place}")):
        dispatch.run_packed(update, signal, state, torch.tensor([0, 5, LENGTH]), check_finite=True)
    signal |= {"beta": 0 * signal["beta"].nan_to_num(), "q": signal["q"].clone()}  # type: ignore[union-attr]
    signal["q"][0, AT, 1] = 1e308  # type: ignore[index]
    large = state._replace(theta=(torch.full_like(state.theta[0], 1e10),))
    place = f"at token {AT} of the packed ones, {AT - 5} of sequence 1 and head 1, entry (0, {AT}, 1"
    with pytest.raises(NotFiniteError, match=re.escape(f"output is not finite: inf {place}")):
        dispatch.run_packed(update, signal, large, torch.tensor([0, 5, LENGTH]), check_finite=True)


@pytest.mark.parametrize("cls", [GatedDeltaNet, SoftmaxAttention])
def test_layers_say_what_is_not_finite(cls: type) -> None:
    layer = cls(8, heads=2, check_finite=True)
    x = torch.randn(2, LENGTH, 8)
    y, state = layer(x)
    assert y.isfinite().all()
    x[1, AT, 3] = math.inf
    named = f"{cls.__name__}: x is not finite: inf at token {AT} of sequence 1, entry (1, {AT}, 3)"
    with pytest.raises(NotFiniteError, match=re.escape(named)):
        layer(x)
    with pytest.raises(NotFiniteError, match=f"{cls.__name__}: x is not finite"):
        layer.step(x[:, AT], state)
    x[1, AT, 3] = 0
    with torch.no_grad():
        next(layer.parameters()).fill_(math.nan)
    with pytest.raises(NotFiniteError, match=f"{cls.__name__}: [a-z]+ is not finite"):
        layer(x)


def test_no_compiler_follows_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(AxesError, match="check_finite reads values"):
        finite.require_finite("who", {"x": torch.ones(1, 1)})
