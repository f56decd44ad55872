"""What every sequence layer promises, whatever its tuple: the classes of `axes.sequence.ALL`, in float64."""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from axes.core.algorithms import Anchor
from axes.core.memory import List
from axes.core.state_update import StateUpdate
from axes.errors import IllegalUpdate, ShapeError
from axes.routes import given, kernel_terms
from axes.routes.counts import period
from axes.sequence import ALL, DeltaNet, GatedDeltaNet, RoPE, SequenceLayer, SoftmaxAttention, base, layer
from axes.sequence.lattice import LATTICE
from axes.sequence.miras import MIRAS
from axes.sequence.titans import TITANS
from axes.sequence.ttt import TTT

D, HEADS, B, T = 12, 2, 2, 9
TOLERANCE = 1e-10

every_layer = pytest.mark.parametrize("cls", ALL, ids=lambda c: c.name)


def make(cls: type[SequenceLayer], dtype: torch.dtype = torch.float64, **options: Any) -> SequenceLayer:
    """A layer whose parameters have all left their initial values: zero weights would hide what hangs on them."""
    made = cls(D, heads=HEADS, dtype=dtype, **options)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return made


def tokens(length: int = T, batch: int = B, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, length, D, dtype=dtype)


def length_of(cls: type[SequenceLayer]) -> int:
    """Long enough to pass an anchor."""
    at = cls.update.parts().step.at
    return at.every + 3 if isinstance(at, Anchor) else T


def gap(a: Any, b: Any) -> float:
    """The largest difference of two nested tuples of tensors, over a tensor's size if above one; infinite if unlike."""
    (xs, form), (ys, other) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    if form != other or any(x.shape != y.shape for x, y in zip(xs, ys, strict=True)):
        return float("inf")
    gaps = [0.0]
    for x, y in zip(xs, ys, strict=True):
        same = torch.where(x == y, torch.zeros_like(x), (x - y).abs())  # equal infinities differ by zero
        finite = y[y.isfinite()].abs()
        gaps += [same.max().item() / max(1.0, finite.max().item() if finite.numel() else 0.0)] if same.numel() else []
    return max(gaps)


def steps(module: SequenceLayer, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
    outputs = []
    for t in range(x.shape[1]):
        y, state = module.step(x[:, t], state)
        outputs.append(y)
    return torch.stack(outputs, 1), state


def gradients(module: SequenceLayer, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y, _ = module(x)
    return list(
        torch.autograd.grad(
            (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum(), [x, *module.parameters()]
        )
    )


# ---- the two forms ------------------------------------------------------------------------------------------------


@every_layer
def test_forward_is_the_recurrence(cls: type[SequenceLayer]) -> None:
    module, x = make(cls), tokens(length_of(cls))
    with torch.no_grad():
        assert gap(module(x), steps(module, x)) < TOLERANCE


@every_layer
def test_the_reference_agrees_with_every_gradient(cls: type[SequenceLayer]) -> None:
    module, x = make(cls), tokens(length_of(cls))
    found = gradients(module, x)
    module.implementation = "reference"
    for a, b in zip(found, gradients(module, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@every_layer
def test_a_split_sequence_continues(cls: type[SequenceLayer]) -> None:
    module, x = make(cls), tokens(length_of(cls))
    with torch.no_grad():
        y, end = module(x)
        for cut in (1, 4):
            first, state = module(x[:, :cut])
            kept = pytree.tree_map(torch.clone, state)
            second, last = module(x[:, cut:], state)
            assert gap((torch.cat((first, second), 1), last), (y, end)) < TOLERANCE
            assert gap(state, kept) == 0, "the state that was passed in has changed"


@every_layer
def test_no_output_sees_the_future(cls: type[SequenceLayer]) -> None:
    module, x = make(cls), tokens(length_of(cls))
    for t in (1, x.shape[1] - 2):
        x = x.detach().requires_grad_()
        y, _ = module(x)
        (before,) = torch.autograd.grad(y[:, :t].square().sum(), x)
        assert before[:, t:].abs().max() == 0 and before[:, :t].abs().max() > 0
        changed = x.detach().clone()
        changed[:, t] += 1
        with torch.no_grad():  # both: some kernels differ when they record gradients
            (y, _), (other, _) = module(x), module(changed)
        assert torch.equal(other[:, :t], y[:, :t])
        assert (other[:, t:] - y[:, t:]).abs().amax((0, 2)).min() > 0


@every_layer
def test_gradients_reach_the_input_and_every_parameter(cls: type[SequenceLayer]) -> None:
    module = make(cls)
    names = ["x", *(n for n, _ in module.named_parameters())]
    for name, g in zip(names, gradients(module, tokens(length_of(cls))), strict=True):
        assert g.isfinite().all() and g.abs().max() > 0, name


@pytest.mark.parametrize("cls", [*TITANS, *TTT, *MIRAS, *LATTICE])
def test_nonlinear_memories_learn_to_recall(cls: type[SequenceLayer]) -> None:
    """Pairs, then their keys alone: thirty steps of Adam lower the error of what is read."""
    width, pairs = 12, 8
    keys, values = torch.randn(4, pairs, width // 2), torch.randn(4, pairs, width // 2)
    x = torch.cat((torch.cat((keys, values), -1), torch.cat((keys, torch.zeros_like(values)), -1)), 1)
    layer, head = cls(width, heads=2), torch.nn.Linear(width, width // 2)
    adam = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=1e-2)
    losses = []
    for _ in range(30):
        loss = (head(layer(x)[0])[:, pairs:] - values).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert losses[-1] < 0.75 * losses[0]


@every_layer
@pytest.mark.parametrize("length", [0, 1])
def test_short_sequences(cls: type[SequenceLayer], length: int) -> None:
    module, x = make(cls), tokens()
    with torch.no_grad():
        y, state = module(x[:, :length])
        assert y.shape == (B, length, D)
        assert gap(module(x[:, length:], state)[0], module(x)[0][:, length:]) < TOLERANCE


@every_layer
def test_a_batch_without_sequences(cls: type[SequenceLayer]) -> None:
    """As the last one of several processes may have."""
    module, x = make(cls), tokens()[:0].requires_grad_()
    y, state = module(x)
    assert y.shape == (0, *x.shape[1:])
    y.sum().backward()
    assert module.step(x[:, 0], state)[0].shape == (0, D)


# ---- padding and packing ------------------------------------------------------------------------------------------


@every_layer
def test_padding_is_skipped_wherever_it_stands(cls: type[SequenceLayer]) -> None:
    module, x = make(cls), tokens(batch=3)
    mask = torch.ones(3, T, dtype=torch.bool)
    mask[0, :3] = mask[1, 6:] = mask[1, 2] = False
    with torch.no_grad():
        y, state = module(x, mask=mask)
        assert y[~mask].abs().max() == 0
        for b in range(3):
            alone, end = module(x[b : b + 1, mask[b]])
            assert gap(y[b : b + 1, mask[b]], alone) < TOLERANCE
            more, single = tokens(3, 3), end
            assert gap(module(more, state)[0][b], module(more[b : b + 1], single)[0][0]) < TOLERANCE


@every_layer
def test_equal_lengths_always_leave_a_state(cls: type[SequenceLayer]) -> None:
    module, x = make(cls), tokens()
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[0, :2] = mask[1, -2:] = False
    with torch.no_grad():
        _, state = module(x, mask=mask)
        assert gap(state, module(torch.stack((x[0, 2:], x[1, :-2])))[1]) < TOLERANCE


@every_layer
def test_packed_sequences_do_not_meet(cls: type[SequenceLayer]) -> None:
    module, x = make(cls), tokens(12, 1)
    ends = [0, 5, 5, 8, 12]
    with torch.no_grad():
        y, state = module(x, cu_seqlens=torch.tensor(ends, dtype=torch.int32))
        for n, (a, b) in enumerate(zip(ends, ends[1:], strict=False)):
            alone, end = module(x[:, a:b])
            assert gap(y[:, a:b], alone) < TOLERANCE
            more = tokens(2, 4)
            assert gap(module(more, state)[0][n], module(more[n : n + 1], end)[0][0]) < TOLERANCE


COUNTING = [cls for cls in ALL if period(cls.update) is not None]


@pytest.mark.parametrize("cls", COUNTING, ids=lambda cls: cls.name)
def test_sequences_of_unequal_length_go_on_where_each_stands(cls: type[SequenceLayer]) -> None:
    """Over anchors: all at once, packed, and token by token, as each alone."""
    module, x, rest = make(cls), tokens(12, 3), tokens(15, 3)
    lengths, later = (12, 3, 7), [0, 15, 15, 20]
    mask = torch.arange(12)[None] < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        _, state = module(x, mask=mask)
        assert state.memory.count.tolist() == list(lengths)
        y, state = module(rest, state)
        packed, ragged = module(torch.cat((rest[0], rest[2, :5]))[None], state, cu_seqlens=torch.tensor(later))
        z, _ = module.step(rest[:, 0], ragged)
        for b, length in enumerate(lengths):
            _, end = module(x[b : b + 1, :length])
            want, end = module(rest[b : b + 1], end)
            assert gap(y[b : b + 1], want) < TOLERANCE
            more = rest[b : b + 1, : later[b + 1] - later[b]]
            if more.shape[1]:
                want, end = module(more, end)
                assert gap(packed[:, later[b] : later[b + 1]], want) < TOLERANCE
            assert gap(z[b : b + 1], module.step(rest[b : b + 1, 0], end)[0]) < TOLERANCE


@every_layer
def test_gradients_of_packed_sequences_are_those_of_each_alone(cls: type[SequenceLayer]) -> None:
    module, x = make(cls), tokens(9, 1).requires_grad_()
    weight = torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype)
    y, _ = module(x, cu_seqlens=torch.tensor([0, 1, 5, 9], dtype=torch.int32))
    packed = torch.autograd.grad((y * weight).sum(), [x, *module.parameters()], materialize_grads=True)
    alone = sum((module(x[:, a:b])[0] * weight).sum() for a, b in ((0, 1), (1, 5), (5, 9)))
    assert gap(packed, torch.autograd.grad(alone, [x, *module.parameters()], materialize_grads=True)) < TOLERANCE


def test_gradients_pass_through_padding() -> None:
    module, x = make(GatedDeltaNet), tokens(batch=1).requires_grad_()
    y, _ = module(torch.cat((tokens(2, 1), x), 1), mask=torch.arange(T + 2)[None] >= 2)
    (padded,) = torch.autograd.grad(y.square().sum(), x)
    (alone,) = torch.autograd.grad(module(x)[0].square().sum(), x)
    torch.testing.assert_close(padded, alone)


# ---- what torch.nn users expect -----------------------------------------------------------------------------------


@every_layer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_device_and_dtype_keywords(cls: type[SequenceLayer], dtype: torch.dtype) -> None:
    module = cls(D, heads=HEADS, device="cpu", dtype=dtype)
    assert {p.dtype for p in module.parameters()} == {dtype}
    y, _ = module(tokens(5, dtype=dtype))
    assert y.dtype == dtype and y.isfinite().all()


@every_layer
def test_a_layer_made_on_meta_is_filled_by_reset_parameters(cls: type[SequenceLayer]) -> None:
    module = cls(D, heads=HEADS, device="meta", dtype=torch.float64)
    assert {p.device.type for p in module.parameters()} == {"meta"}
    module = module.to_empty(device="cpu")
    with torch.no_grad():
        for p in [*module.parameters(), *module.buffers()]:
            p.fill_(torch.nan)
    module.reset_parameters()
    assert module(tokens())[0].isfinite().all()


@every_layer
def test_reset_parameters_follows_the_seed_and_the_constructor(cls: type[SequenceLayer]) -> None:
    fresh, module = cls(D, heads=HEADS, dtype=torch.float64), make(cls)
    torch.manual_seed(3)
    module.reset_parameters()
    first = copy.deepcopy(module.state_dict())
    torch.manual_seed(3)
    module.reset_parameters()
    for name, value in module.state_dict().items():
        assert torch.equal(value, first[name]), name
    for (name, p), q in zip(fresh.named_parameters(), module.parameters(), strict=True):
        constant = p.numel() > 1 and p.std() == 0
        assert torch.equal(p, q) if constant else 0.3 < (q.norm() + 1e-3) / (p.norm() + 1e-3) < 3, name


@every_layer
def test_repr_names_sizes_and_tuple(cls: type[SequenceLayer]) -> None:
    module = cls(D, heads=HEADS)
    assert f"d_model={D}, heads={HEADS}" in repr(module) and repr(module.update) in repr(module)


@every_layer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(cls: type[SequenceLayer], dtype: torch.dtype) -> None:
    module, x = make(cls, torch.float32), tokens(dtype=torch.float32)
    exact, _ = module(x)
    with torch.autocast("cpu", dtype):
        y, state = module(x)
        one, _ = module.step(x[:, 0], None)
        loss = y.float().square().mean()
    loss.backward()
    assert y.dtype.is_floating_point and y.isfinite().all() and one.isfinite().all()
    assert (y - exact).norm() < 0.1 * exact.norm()
    if not isinstance(cls.update.parts().memory, List):  # which keeps pairs as they come
        assert all(leaf.dtype != dtype for leaf in pytree.tree_leaves(state.memory)), "the recurrence keeps float32"
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@every_layer
@pytest.mark.parametrize("shared", [False, True], ids=["own keys", "shared keys"])
def test_where_kernels_would_begin_with_no_state_torch_may_too(
    cls: type[SequenceLayer], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widths or dtypes that a kernel refuses are only met behind the layer: the same bits, the state's too."""
    if not kernel_terms.empty_by_kernel(cls.update):
        pytest.skip("its kernels are given a state")
    try:
        layer = make(cls, num_v_heads=2 * HEADS) if shared else make(cls)
    except (TypeError, ShapeError, IllegalUpdate):
        pytest.skip("its heads have keys of their own")
    if layer.initial is not None or layer.around.cell is not None:
        pytest.skip("it begins with what it has learned, or is a cell")
    x = tokens()
    want = layer(x)
    monkeypatch.setattr(SequenceLayer, "_begins_by_kernel", lambda self, x: True)
    monkeypatch.setattr(SequenceLayer, "_init_memory", None)  # nobody asks for it
    for a, b in zip(pytree.tree_leaves(want), pytree.tree_leaves(layer(x)), strict=True):
        assert not isinstance(a, Tensor) or a.dtype == b.dtype and torch.equal(a, b)


@every_layer
def test_state_detaches_and_survives_a_file(cls: type[SequenceLayer]) -> None:
    module, x = make(cls), tokens()
    _, state = module(x[:, :5])
    detached = pytree.tree_map(torch.detach, state)
    assert not any(leaf.requires_grad for leaf in pytree.tree_leaves(detached))
    with io.BytesIO() as file:
        torch.save(detached, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
    assert gap(loaded, detached) == 0
    assert gap(module(x[:, 5:], loaded), module(x[:, 5:], state)) == 0


@every_layer
def test_state_does_not_grow_unless_it_is_a_list(cls: type[SequenceLayer]) -> None:
    module, x = make(cls), tokens()
    sizes = [sum(leaf.numel() for leaf in pytree.tree_leaves(module(x[:, :n])[1])) for n in (3, 9)]
    assert (sizes[0] == sizes[1]) != isinstance(cls.update.parts().memory, List)


@every_layer
def test_checkpointing_gives_the_same_gradients(cls: type[SequenceLayer]) -> None:
    module, x = make(cls), tokens()
    plain = gradients(module, x)
    module.checkpoint = True
    for a, b in zip(plain, gradients(module, x), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@every_layer
def test_copies_and_pickles(cls: type[SequenceLayer]) -> None:
    module, x = make(cls), tokens()
    y, _ = module(x)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x)[0], y) and twin.update == module.update
    twin = cls(D, heads=HEADS, dtype=torch.float64)
    twin.load_state_dict(module.state_dict())
    assert torch.equal(twin(x)[0], y)


def test_a_layer_of_a_tuple_of_ones_own_pickles() -> None:
    """Its class stands in no module: an object is made again from the declaration, in other processes too."""
    module, x = make(layer(DeltaNet.update, "Mine")), tokens()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(twin) is type(module) and torch.equal(twin(x)[0], module(x)[0])


def test_masks_and_boundaries_of_other_integers() -> None:
    """As tokenizers (0 and 1) and cumulative sums (int64) give them."""
    module, x = make(GatedDeltaNet), tokens()
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[0, :2] = mask[1, -2:] = False
    assert torch.equal(module(x, mask=mask.long())[0], module(x, mask=mask)[0])
    bounds = torch.tensor([0, 4, T])
    packed = x[:1]
    assert torch.equal(module(packed, cu_seqlens=bounds)[0], module(packed, cu_seqlens=bounds.int())[0])


# the compiler looks at .grad of whatever passes a graph break, which warns and changes nothing
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
# test_compiled.py has the gated delta rule by aot_eager in every run, with a state too
@pytest.mark.parametrize(
    "cls", [pytest.param(GatedDeltaNet, marks=pytest.mark.slow), SoftmaxAttention], ids=lambda c: c.name
)
def test_compiles(cls: type[SequenceLayer]) -> None:
    module, x = make(cls, torch.float32), tokens(dtype=torch.float32)
    # with decompositions, as inductor has them: aot_eager alone gives silu_backward wrong strides (torch 2.13)
    compiled = torch.compile(module, backend="aot_eager_decomp_partition")
    for a, b in zip(gradients(module, x), gradients(compiled, x), strict=True):
        torch.testing.assert_close(a, b)
    _, state = compiled(x)
    torch.testing.assert_close(compiled(x, state)[0], module(x, state)[0])
    torch.compiler.reset()


def test_a_step_checks_its_state_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the layer, whose words name it: the door of `dispatch` behind it is for those who come there first."""
    module, x = make(GatedDeltaNet), tokens()
    _, state = module(x)
    asked = []
    true = given.require_state
    for place in (base, given):
        monkeypatch.setattr(place, "require_state", lambda *a, **n: asked.append(a[0]) or true(*a, **n))
    given.asked(module.update).forget()
    module.step(x[:, 0], state)
    assert asked == ["GatedDeltaNet"]


# ---- declarations -------------------------------------------------------------------------------------------------


@every_layer
def test_declaration(cls: type[SequenceLayer]) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", cls.name)
    assert cls.__doc__ and isinstance(cls.update, StateUpdate)
    for text in (cls.paper, cls.equation, cls.differs):
        assert text.strip() == text != ""
    assert re.match(r"\s*@\w+\{[\w:-]+,\n", cls.bibtex) and cls.bibtex.count("{") == cls.bibtex.count("}")
    for field in ("author", "title", "year"):
        assert re.search(rf"^\s+{field}\s*=\s*\{{", cls.bibtex, re.MULTILINE), field


def test_names_are_unique() -> None:
    names = [cls.name for cls in ALL]
    assert isinstance(ALL, tuple) and len(names) == len(set(names)) == len(set(ALL))


# ---- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda m: m(torch.zeros(2, 3, 4, dtype=torch.float64)), r"x must be \(B, T, D\) with D = 12, got \(2, 3, 4\)"),
        (lambda m: m(tokens()[0]), r"x must be \(B, T, D\)"),
        (lambda m: m.step(tokens()), r"x must be \(B, D\)"),
        (lambda m: m(tokens(dtype=torch.float32)), "x is torch.float32, the layer torch.float64"),
        (lambda m: m(tokens().to("meta")), "x is on meta, the layer on cpu"),
        (
            lambda m: m(tokens(), mask=torch.ones(2, 3, dtype=torch.bool)),
            r"mask must be \(B, T\) = \(2, 9\), got \(2, 3\)",
        ),
        (lambda m: m(tokens(), mask=torch.ones(B, T)), "mask must be true"),
        (lambda m: m(tokens(), cu_seqlens=torch.tensor([0, 9], dtype=torch.int32)), "packed input has B = 1, got 2"),
        (lambda m: m(tokens(9, 1), cu_seqlens=torch.tensor([0.0, 9.0])), "cu_seqlens must be int32"),
        (lambda m: m(tokens(9, 1), cu_seqlens=torch.tensor([0, 8], dtype=torch.int32)), "must rise from 0 to T = 9"),
        (lambda m: m(tokens(9, 1), cu_seqlens=torch.tensor([0, 7, 3, 9], dtype=torch.int32)), "must rise"),
        (
            lambda m: m(tokens(), mask=torch.ones(B, T, dtype=torch.bool), cu_seqlens=torch.tensor([0, 9])),
            "mask or cu_seqlens, not both",
        ),
        (lambda m: m(tokens(), m.init_state(3, dtype=torch.float64)), "state of 3 sequences for 2"),
    ],
)
def test_bad_input_is_named(call: Any, complaint: str) -> None:
    with pytest.raises(ShapeError, match=complaint):
        call(make(DeltaNet))


def test_bad_sizes_are_named() -> None:
    with pytest.raises(ShapeError, match="RoPE: Rotation: keys are rotated in pairs, their width must be even, got 7"):
        RoPE(14, heads=2)
    with pytest.raises(ShapeError, match="d_model=12 is not a multiple of heads=5"):
        DeltaNet(12, heads=5)
    assert DeltaNet(12, heads=5, d_k=4, d_v=3)(torch.randn(1, 2, 12))[0].shape == (1, 2, 12)
    for sizes in ({"d_model": 0}, {"heads": 0}, {"d_k": -1}, {"d_v": 0}):
        with pytest.raises(ShapeError, match="must be at least 1"):
            DeltaNet(**{"d_model": 12, "heads": 2, **sizes})


def test_a_keyword_of_others_is_refused_with_those_that_are_taken() -> None:
    said = "DeltaNet got an unexpected keyword argument 'num_heads': it takes d_model, heads, d_k, .*, device, dtype$"
    with pytest.raises(TypeError, match=said):
        DeltaNet(D, num_heads=2)  # type: ignore[arg-type]


def test_a_detached_state_is_the_same_without_its_graph() -> None:
    layer = make(TITANS[0], torch.float32)
    x = tokens(dtype=torch.float32)
    _, state = layer(x[:, :5])
    assert state is not None
    assert all(p.requires_grad for p in (*state.tails, *state.memory.theta))
    cut = state.detach()
    assert gap(cut, state) == 0 and type(cut) is type(state) and type(cut.memory.via) is type(state.memory.via)
    assert not any(p.requires_grad for p in pytree.tree_leaves(cut))
    assert torch.equal(layer(x[:, 5:], cut)[0], layer(x[:, 5:], state)[0])


def test_a_tuple_without_keys_is_no_layer() -> None:
    from axes.core.costs import Given

    with pytest.raises(IllegalUpdate, match="needs keys"):
        layer(StateUpdate(Given()))(D)


@every_layer
def test_a_memory_held_in_16_bits_is_computed_in_32(cls: type[SequenceLayer]) -> None:
    """A step, a sequence and packed sequences of a bfloat16 state: those of the wide one, rounded once."""
    layer = make(cls, torch.float32)
    if layer.update.parts().memory.kind == "list":
        return  # which has the dtype of its layer
    x = tokens(dtype=torch.float32)
    with torch.no_grad():
        _, state = layer(x)
        assert state is not None
        held = state.to(torch.bfloat16)
        wide = held.to(torch.float32)
        assert {p.dtype for p in pytree.tree_leaves(held.memory)} <= {torch.bfloat16, torch.int64}
        for call in (
            lambda s: layer.step(x[:, 0], s),
            lambda s: layer(x, s),
            lambda s: layer(x.reshape(1, -1, D), s, cu_seqlens=torch.tensor([0, T, 2 * T])),
        ):
            (y, after), (want, meant) = call(held), call(wide)
            assert torch.equal(y, want)
            if meant is not None:
                assert after is not None and gap(after, meant.to(torch.bfloat16)) == 0


def test_a_memory_is_held_as_a_whole() -> None:
    layer = make(TITANS[0], torch.float32)
    state = layer.init_state(B)
    mixed = state._replace(memory=state.memory._replace(via=state.to(torch.bfloat16).memory.via))
    with pytest.raises(ShapeError, match=r"held in 16 bits as a whole, by state.to\(torch.bfloat16\)"):
        layer.step(tokens(dtype=torch.float32)[:, 0], mixed)
    wide = make(GatedDeltaNet)
    with pytest.raises(ShapeError, match="float64 beside float64"):
        wide.step(tokens()[:, 0], wide.init_state(B).to(torch.bfloat16))


def test_a_list_wider_than_its_tokens_is_refused() -> None:
    layer = make(RoPE, torch.float32)
    x = tokens(dtype=torch.float32)
    _, state = layer(x)
    assert state is not None
    with pytest.raises(ShapeError, match=r"theta\[0\] is float64 beside torch.float32"):
        layer.step(x[:, 0], state.to(torch.float64))
