"""Loops of C generated from a token's step: outputs, last states and all gradients against the float64 interpreter."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from axes import sequence
from axes.bench.rules import RULES
from axes.core import reference
from axes.core.algorithms import Anchor, Momentum, Step
from axes.core.costs import Alignment, Huber, SquaredError
from axes.core.geometry import Entropic, SoftThreshold, Spectral
from axes.core.monoids import Scalar
from axes.core.rates import Per
from axes.core.state_update import State, StateUpdate
from axes.errors import AxesError
from axes.programs import c_library, c_text
from axes.routes import dispatch, select, token
from axes.routes.choice import NoImplementation
from axes.sequence import YaadMatrix

pytestmark = pytest.mark.skipif(c_library.no_compiler() is not None, reason="no C compiler")

UPDATES = {
    "anchors, norms of rows and columns": sequence.MonetaMatrix.update,
    "maxima and exponentials": sequence.MemoraMatrix.update,
    "statistics and counts": sequence.AdamNet.update,
    "columns that meet": sequence.LatticeDec.update,
    "branches on values": YaadMatrix.update,
    "held values that hear a token": StateUpdate(
        SquaredError(),
        SoftThreshold(Per("eta", "row", "positive")),
        Scalar("decay"),
        Step(Per("beta"), at=Anchor(16)),
    ),
    "somebody's": StateUpdate(
        Huber(1.0, "norm"),
        Entropic("column"),
        Scalar("decay"),
        Step(Per("beta"), via=(Momentum(0.9, "ema", debias=True),)),
    ),
}
SLOTS = sequence.LatticeOSR.update
D_V, D_K = 5, 6
EXACT = 1e-12


def draw(update: StateUpdate, batch: int, length: int, heads: int, dtype: torch.dtype) -> dict[str, Tensor]:
    sizes = {"v": D_V, "k": D_K}
    made: dict[str, Tensor] = {}
    for n, shape in token._form(update).signal.items():
        x = torch.rand(batch, length, heads, *[sizes[a] for a in shape if a], dtype=dtype)
        made[n] = -0.3 * x if "decay" in n else 0.05 + 0.2 * x if n in ("eta", "beta", "gamma") else x - 0.5
    return made


def begun(update: StateUpdate, signal: dict[str, Tensor], count: int = 0) -> State:
    """A state between two anchors, none of whose entries is another's."""
    leaves, form = pytree.tree_flatten(update.init({n: x[:, 0] for n, x in signal.items()}))
    leaves = [x + 0.2 * torch.rand_like(x) if x.is_floating_point() else x + count for x in leaves]
    return pytree.tree_unflatten(leaves, form)  # type: ignore[no-any-return]


def results(
    update: StateUpdate, signal: dict[str, Tensor], state: State, dtype: torch.dtype, run: Any
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs with the last state, and the gradients by signal and first state of a fixed functional of these."""
    live = {n: x.to(dtype).clone().requires_grad_() for n, x in signal.items()}
    leaves, form = pytree.tree_flatten(state)
    leaves = [x.to(dtype).clone().requires_grad_() if x.is_floating_point() else x for x in leaves]
    out, last = run(update, live, pytree.tree_unflatten(leaves, form))
    ends = [x for x in pytree.tree_leaves(last) if x.is_floating_point()]
    total = sum((x * torch.linspace(-1, 1, x.numel(), dtype=dtype).reshape(x.shape)).sum() for x in (out, *ends))
    inputs = [*live.values(), *(x for x in leaves if x.is_floating_point())]
    found = torch.autograd.grad(total, inputs, allow_unused=True)  # type: ignore[arg-type]
    return [x.detach() for x in (out, *ends, last.count.reshape(-1))], list(found)


def agree(ours: tuple[list[Any], list[Any]], exact: tuple[list[Any], list[Any]], bound: float) -> None:
    for n, (a, b) in enumerate(zip(ours[0] + ours[1], exact[0] + exact[1], strict=True)):
        if a is None or b is None:
            assert a is b or float((b if a is None else a).norm()) == 0.0, n
            continue
        assert a.shape == b.shape and torch.isfinite(a).all(), n
        assert float((a.double() - b).norm()) <= bound * float(b.double().norm()) + 1e-300, n


def by_c(update: StateUpdate, signal: Any, state: State) -> tuple[Tensor, State]:
    return dispatch.run(update, signal, state, implementation="c")


def interpreted(update: StateUpdate, signal: Any, state: State) -> tuple[Tensor, State]:
    return reference.run(update, signal, state, time=1)


def by_sequences(cuts: list[int]) -> tuple[Any, Any]:
    """How three packed sequences run: by a loop of C, and one after the other by the interpreter."""

    def packed(update: StateUpdate, signal: Any, state: State) -> tuple[Tensor, State]:
        return dispatch.run_packed(update, signal, state, torch.tensor(cuts, dtype=torch.int32), implementation="c")

    def alone(update: StateUpdate, signal: Any, state: State) -> tuple[Tensor, State]:
        outputs, ends = [], []
        for i in range(3):
            one = pytree.tree_map(lambda x: x[i : i + 1] if x.ndim and x.shape[0] == 3 else x, state)  # noqa: B023
            if cuts[i + 1] > cuts[i]:
                out, one = interpreted(update, {n: x[:, cuts[i] : cuts[i + 1]] for n, x in signal.items()}, one)
                outputs.append(out)
            ends.append(one)
        count = torch.stack([x.count for x in ends])
        join = pytree.tree_map(lambda *x: torch.cat(x) if x[0].ndim and x[0].shape[0] == 1 else x[0], *ends)
        return torch.cat(outputs, 1), join._replace(count=count)

    return packed, alone


def require_no_bit_of_threads(update: StateUpdate, signal: dict[str, Tensor]) -> None:
    state, before, found = begun(update, signal), torch.get_num_threads(), []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            found.append(results(update, signal, state, torch.float32, by_c))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(sum(found[0], []), sum(found[1], []), strict=True) if a is not None)


def require_spoilt_behind(update: StateUpdate, signal: dict[str, Tensor], token: int) -> None:
    """What is no number of a head in the first sequence is there from its token on, and nowhere else."""
    state = begun(update, signal)
    clean, _ = by_c(update, signal, state)
    signal["v"][0, token, 1, 2] = float("nan")
    spoilt, _ = by_c(update, signal, state)
    assert torch.equal(clean[:, :token], spoilt[:, :token]) and torch.equal(clean[:, :, 0], spoilt[:, :, 0])
    assert not spoilt[0, token:, 1].isfinite().any()


@pytest.mark.parametrize("name", UPDATES)
def test_a_loop_is_the_interpreter(name: str) -> None:
    """Several chunks, the last one short, from a state between two anchors."""
    update = UPDATES[name]
    torch.manual_seed(0)
    signal = draw(update, 2, 70, 3, torch.float64)
    state = begun(update, signal, count=9)
    exact = results(update, signal, state, torch.float64, interpreted)
    agree(results(update, signal, state, torch.float64, by_c), exact, EXACT)
    agree(results(update, signal, state, torch.float32, by_c), exact, 1e-4)


@pytest.mark.slow
def test_every_rule_that_is_walked() -> None:
    """Those of the benchmark, at 40 tokens."""
    torch.manual_seed(0)
    walked = 0
    for rule in RULES:
        update = select.computed(rule.update)[0]
        if not select._bends(update) or token.no_loop(update, torch.device("cpu"), asked(40), 1) is not None:
            continue
        signal = draw(update, 1, 40, 2, torch.float64)
        state = begun(update, signal, count=9)
        exact = results(update, signal, state, torch.float64, interpreted)
        agree(results(update, signal, state, torch.float64, by_c), exact, 1e-9)
        walked += 1
    assert walked >= 12


def test_packed_sequences() -> None:
    """Of unequal length, one of them empty, each with an anchor of its own."""
    update = UPDATES["statistics and counts"]
    torch.manual_seed(0)
    signal = draw(update, 1, 60, 2, torch.float64)
    first = {n: x[:, :3].transpose(0, 1).expand(3, 1, *x.shape[2:]) for n, x in signal.items()}
    state = begun(update, first, count=14)

    packed, alone = by_sequences([0, 7, 7, 60])
    exact = results(update, signal, state, torch.float64, alone)
    agree(results(update, signal, state, torch.float64, packed), exact, EXACT)


def test_derivatives_of_derivatives() -> None:
    torch.manual_seed(0)
    signal = draw(SLOTS, 1, 40, 2, torch.float64)
    state = begun(SLOTS, signal)
    found = []
    for run in (by_c, interpreted):
        live = {n: x.clone().requires_grad_() for n, x in signal.items()}
        out, _ = run(SLOTS, live, state)
        (slope,) = torch.autograd.grad(out.square().sum(), live["k"], create_graph=True)
        found.append((slope, *torch.autograd.grad(slope.square().sum(), list(live.values()))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_maxima_are_those_of_negative_numbers() -> None:
    """Logits whose exponentials are zero in float64."""
    update = UPDATES["maxima and exponentials"]
    torch.manual_seed(0)
    signal = draw(update, 1, 8, 1, torch.float64)
    state = begun(update, signal)
    state = state._replace(theta=tuple(x - 1e4 for x in state.theta), anchor=tuple(x - 1e4 for x in state.anchor))
    exact = results(update, signal, state, torch.float64, interpreted)
    agree(results(update, signal, state, torch.float64, by_c), exact, 1e-9)


def test_threads_change_no_bit() -> None:
    torch.manual_seed(0)
    require_no_bit_of_threads(SLOTS, draw(SLOTS, 2, 40, 3, torch.float32))


def test_what_is_no_number_stays_behind_its_token() -> None:
    torch.manual_seed(0)
    require_spoilt_behind(SLOTS, draw(SLOTS, 1, 40, 2, torch.float32), 17)


# ---- when ------------------------------------------------------------------------------------------------------------


def asked(tokens: int) -> dict[str, tuple[int, ...]]:
    return {"v": (1, tokens, 2, D_V), "k": (1, tokens, 2, D_K), "q": (1, tokens, 2, D_K)}


def test_long_sequences_that_bend_are_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    worth = token.WORTH
    choice = dispatch.select(SLOTS, "cpu", shapes=asked(worth))
    assert choice[:2] == ("token", "c") and "loop of C" in choice.reason
    for shapes in (asked(worth - 1), None):
        short = dispatch.select(SLOTS, "cpu", shapes=shapes)
        assert short[:2] == ("gram", "torch") and f"no loop of C: it is compiled for {worth}" in short.reason
    assert dispatch.select(SLOTS, "cpu", shapes=asked(worth), implementation="torch")[:2] == ("gram", "torch")
    chain = StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(Per("beta"), at="gated"))
    assert dispatch.select(chain, "cpu", shapes=asked(worth))[:2] == ("chain", "torch")
    monkeypatch.setattr(c_library, "no_compiler", lambda: "there is no C compiler")
    assert dispatch.select(SLOTS, "cpu", shapes=asked(worth))[:2] == ("gram", "torch")
    with pytest.raises(NoImplementation, match="no loop of C.*there is no C compiler"):
        dispatch.select(SLOTS, "cpu", shapes=asked(worth), implementation="c")


def test_what_is_no_program_says_so() -> None:
    with pytest.raises(NoImplementation, match="no loop of C.*no operation on tiles"):
        dispatch.select(StateUpdate(Alignment(), Spectral("polar")), "cpu", shapes=asked(8), implementation="c")
    with pytest.raises(NoImplementation, match="no loop of C.*on a CPU"):
        dispatch.select(SLOTS, "cuda", shapes=asked(8), implementation="c")
    with pytest.raises(NoImplementation, match="no loop of C.*last read"):
        sequence.GRU(8, implementation="c")(torch.zeros(1, 2, 8))
    with pytest.raises(NoImplementation, match="no loop of C.*attention"):
        dispatch.select(sequence.SoftmaxAttention.update, "cpu", shapes=asked(8), implementation="c")


def test_run_walks_where_select_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where a transform of torch follows the call, another route does."""
    monkeypatch.setattr(token, "WORTH", 8)
    signal, seen, walk = draw(SLOTS, 1, 8, 2, torch.float32), [], token.run
    monkeypatch.setattr(token, "run", lambda *a, **k: seen.append("c") or walk(*a, **k))
    state = begun(SLOTS, signal)
    out, _ = dispatch.run(SLOTS, signal, state)
    assert seen == ["c"]
    monkeypatch.setattr(dispatch, "by_formula", lambda *given: False)  # as under vmap and jvp
    other, _ = dispatch.run(SLOTS, signal, state)
    assert seen == ["c"]
    torch.testing.assert_close(out, other, rtol=1e-4, atol=1e-5)
    with pytest.raises(NoImplementation, match="transforms"):
        by_c(SLOTS, signal, state)


def test_compilers_and_fake_tensors_take_other_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token, "WORTH", 8)
    torch.manual_seed(0)
    layer, x = sequence.LatticeDec(8, heads=2), torch.randn(1, 8, 8)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x)[0], layer(x)[0], rtol=1e-4, atol=1e-5)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert sequence.LonghornDiagonal(8, heads=2)(mode.from_tensor(x))[0].shape == (1, 8, 8)
    assert sequence.LatticeDec(8, heads=2, device="meta")(x.to("meta"))[0].shape == (1, 8, 8)


@pytest.mark.parametrize("broken", ["no headers", "nowhere to load from"])
def test_a_compiler_that_does_not_work_is_none(broken: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A call that nobody asked C for then goes by torch."""
    if broken == "no headers":
        script = tmp_path / "cc"
        script.write_text("#!/bin/sh\necho 'math.h: no such file' >&2\nexit 1\n")
        script.chmod(0o755)
        monkeypatch.setattr(c_library, "compiler", lambda: str(script))
    else:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    c_library.no_compiler.cache_clear()
    try:
        assert "C is not compiled and loaded here" in str(c_library.no_compiler())
        assert dispatch.select(SLOTS, "cpu", shapes=asked(token.WORTH))[:2] == ("gram", "torch")
    finally:
        c_library.no_compiler.cache_clear()


# ---- text ------------------------------------------------------------------------------------------------------------


def test_numbers_as_text() -> None:
    made = ", ".join(c_text.constant(x) for x in (0.1, -1e-30, float("inf"), float("-inf")))
    assert made == "((real)0.1), ((real)-1e-30), ((real)INFINITY), (-(real)INFINITY)"


def test_a_compiler_that_refuses_is_quoted() -> None:
    with pytest.raises(AxesError, match="does not compile a loop of C.*error"):
        c_library.library("int forward( {")


def test_every_operation_of_a_program_has_text() -> None:
    """By its value, in both precisions, next to where it branches."""
    from axes.programs import tiles

    points = torch.tensor([-1.5, -0.25, 0.0, 0.3, 2.0, float("nan")], dtype=torch.float64)
    for name, code in c_text.CODE.items():
        if name == "where":
            continue
        two = "{1}" in code
        text = code.format("x[i]", "y[i]")
        lines = [c_text.header("double", 1, 1), "int f(void *const *t, const long *n, long first, long end) {",
                 "const real *x = t[0], *y = t[1]; real *z = t[2];",
                 f"for (long i = first; i < end; i++) z[i] = {text};", "return 0; }"]  # fmt: skip
        x, y = (points.repeat_interleave(6), points.repeat(6)) if two else (points, points)
        z = torch.empty_like(x)
        c_library.Kernel("\n".join(lines), "f")[(x.numel(),)](x, y, z)
        plain = {"and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not}
        call = plain.get(name, getattr(torch, name, None))
        assert call is not None and name in {*tiles._ENTRYWISE.values()}
        want = (call(x, y) if two else call(x)).double()
        if name == "sign":  # torch's of what is no number is zero
            want = torch.where(x.isnan(), x, want)
        torch.testing.assert_close(z, want, rtol=1e-14, atol=0, equal_nan=True)


def test_costs_without_rates_walk_too() -> None:
    update = StateUpdate(Alignment(), Entropic("column"), Scalar("decay"))
    signal = draw(update, 1, 40, 1, torch.float64)
    state = begun(update, signal)
    exact = results(update, signal, state, torch.float64, interpreted)
    agree(results(update, signal, state, torch.float64, by_c), exact, EXACT)


def test_a_layer_takes_it_by_name() -> None:
    """A sequence, the rest of it and one token, as by torch."""
    layers = [sequence.LatticeDec(12, heads=2, implementation=who) for who in ("c", "torch")]  # type: ignore[arg-type]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(1, 9, 12)
    found = []
    for layer in layers:
        first, state = layer(x[:, :5])
        rest, state = layer(x[:, 5:8], state)
        last, state = layer.step(x[:, 8], state)
        found.append((first, rest, last, state.memory.theta[0]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
