"""Facts that follow from a tuple, by algebra: feedback, the affine chain of state and buffers, legal routes.

Nothing here is declared by an instance. Autograd's Jacobian of the interpreter is the law that tests check it with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, final

import torch
from torch import Tensor

from axes.core.algorithms import Anchor, Held, Read, Sum
from axes.core.costs import Linear
from axes.core.facts import fact
from axes.core.legality import factors, gates
from axes.core.memory import Entries
from axes.core.monoids import Element, rotate
from axes.core.rates import Per, Rate, Shape, Signal, rate_shape, resolve
from axes.core.state_update import StateUpdate

Feedback = Literal["none", "affine", "nonlinear"]
Structure = Literal["identity", "scalar", "diagonal", "dplr", "dense"]


@fact
def feedback(update: StateUpdate) -> Feedback:
    """How the drive of a datum depends on state that the same chunk of data wrote: this decides the route."""
    cost, h, _, step, memory = update.parts()
    if isinstance(cost, Linear) or isinstance(step.at, Anchor):
        return "none"
    if "g" in cost.needs:
        return "nonlinear"
    if not update.drive_sees_state:
        return "none"
    affine = cost.curvature != "nonlinear" and memory.linear and memory.kind != "list" and h.is_identity
    return "affine" if affine else "nonlinear"


def block_size(update: StateUpdate) -> int:
    """Slots of the chain [theta | buffers]."""
    return 1 + len(update.filters())


@fact
def structure(update: StateUpdate) -> Structure:
    """The structure of one slot's effective transition, retention and curvature together."""
    _, _, monoid, step, memory = update.parts()
    kinds = gates(monoid)
    curved = feedback(update) == "affine" and update._predicts
    if "dense" in kinds or "rotation" in kinds and (curved or kinds - {"rotation", "scalar"}):
        return "dense"
    if "low rank" in kinds or (curved and memory.kind != "entries"):
        return "dplr"
    if kinds & {"diagonal", "row", "hadamard", "rotation"} or curved:
        return "diagonal"
    return "identity" if kinds <= {"identity"} and block_size(update) == 1 else "scalar"


@fact
def no_chain(update: StateUpdate) -> str | None:
    """Why the update is not an affine chain that the scans take, or None if it is."""
    cost, h, monoid, step, memory = update.parts()
    kinds = gates(monoid)
    if memory.kind not in ("matrix", "entries"):
        return f"{type(memory).__name__} memory is not one matrix"
    if isinstance(step.at, Anchor):
        return "an anchored gradient is constant inside its chunk: the cascade is its exact form"
    if feedback(update) == "nonlinear":
        return f"{type(cost).__name__} with {type(h).__name__} is not affine in the state"
    if cost.drives is None:
        return f"{cost!r} is driven by more or less than the value or the error"
    if cost.encode:
        return "the encoding cost feeds back on the value side: its transition acts from the left"
    if not h.is_identity or not step.lazy:
        return f"h = {type(h).__name__} acts on the state"
    if step.steps > 1:
        return "several steps on one datum"
    if step.read is not None or step.start != "zero":
        return "a read point or a first-drive start is not carried by the chain"
    if rate_shape(step.rate) not in ("scalar", "key", "row"):
        return "an element-wise step size has no rank-one write"
    elementwise = {"identity", "scalar", "diagonal", "row", "hadamard"}
    if memory.kind == "entries" and (step.via or not kinds <= elementwise):
        return "entry-wise memory chains with element-wise gates only"
    if "hadamard" in kinds and (
        kinds & {"low rank", "dense", "rotation"} or update._predicts and memory.kind == "matrix"
    ):
        return "a Hadamard gate does not compose with a matrix transition"
    for f in update.filters():
        _, fh, fm, fs, _ = f.parts()
        if not fh.is_identity or fs.debias or fs.start != "zero" or fs.via or not fs.lazy:
            return "a filter with geometry, bias correction or filters of its own is not linear with known coefficients"
        if not gates(fm) <= {"identity", "scalar", "diagonal", "zero"} or rate_shape(fs.rate) not in ("scalar", "key"):
            return "filters of a chain take scalar or key-side gates"
    if step.via and kinds & {"rotation", "dense"}:
        return "buffers next to a rotated or dense state are not carried by the chain"
    if isinstance(cost.ridge, Per) or cost.ridge != 0.0:
        if kinds & {"rotation", "dense"} or "low rank" in kinds and step.at == "gated":
            return "a ridge next to a rotated or mixed state is not carried by the chain"
        if rate_shape(cost.ridge) == "square":
            return "an element-wise ridge has no transition on the key side"
    if step.via and step.debias:
        return "a normaliser behind filters is not carried by the chain"
    return None


@fact
def no_cascade(update: StateUpdate) -> str | None:
    """Why stages cannot run one after another inside a chunk, or None if they can."""
    step, memory = update.parts().step, update.parts().memory
    if memory.kind == "list":
        return "a list memory is attention"
    if feedback(update) != "none":
        return "the drive depends on the state inside a chunk"
    if not step.lazy:
        return "an agile state projects at every datum"
    for u in (update, *update.filters(), *(s for f in (update, *update.filters()) for s in f.parts().h.stats)):
        _, uh, um, us, _ = u.parts()
        if not gates(um) <= {"identity", "zero", "scalar", "diagonal", "row", "hadamard"}:
            return "stages scan element-wise gates only"
        if "weights" in uh.reads:
            return "a filter that sees the weights feeds them back at every datum"
        if us.via and u is not update:
            return "filters of filters"
        if isinstance(us.at, Held):
            return "a held value is refreshed at some data and kept at others"
        if us.start != "zero" or us.read is not None and u is update:
            return "a first-drive start or an outer read point"
    if step.debias:
        return "a keyed normaliser is the affine chain's"
    return None


@fact
def no_gram(update: StateUpdate) -> str | None:
    """Why the exact Gram-space form of normalised slots does not apply, or None if it does (lattice.md 3.2)."""
    cost, h, monoid, step, memory = update.parts()
    if memory.kind != "slots" or h.sphere is None or step.lazy:
        return "only normalised slots have a Gram-space form"
    if h.sphere != ("columns", 1.0):
        return "slots are unit columns"
    if cost.encode:
        return "the encoding rule acts on the left: no closed Gram form is known"
    if cost.drives is None or isinstance(cost.ridge, Per) or cost.ridge != 0.0:
        return f"{cost!r} is driven by more or less than the value or the error"
    if (
        step.at != "prev"
        or step.via
        or step.read
        or step.steps > 1
        or rate_shape(step.rate) != "scalar"
        or step.start != "zero"
    ):
        return "the Gram form takes one explicit step with a scalar rate at the previous state"
    if not gates(monoid) <= {"identity", "scalar"}:
        return "only a scalar forget gate folds into the step"
    return None


@fact
def no_attention(update: StateUpdate) -> str | None:
    """Why the update is not attention over a stored list, or None if it is."""
    cost, _, monoid, _, memory = update.parts()
    if memory.kind != "list":
        return f"{type(memory).__name__} memory does not keep a list"
    if update.drive_sees_state:
        return "the stored values depend on earlier reads"
    if cost.drives != "target":
        return f"{cost!r} stores something else than the value"
    turns = [p for p in factors(monoid) if p.kind not in ("identity", "scalar")]
    rotations = all(p.kind == "rotation" for p in turns)
    if not rotations and not (len(turns) == 1 and turns[0].rank_one):
        return "keys are turned by rotations or transported by one reflection a token, besides scalar gates"
    return None


# ---- the chain ---------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class Chain:
    """X_t = X_{t-1} M_t + sum_r (X_{t-1} . a_r) b_r^T + v k^T  over X = [theta | buffers], per token.

    gate: logs (..., T, 1|d_k) of the one-slot chain, or block: (..., T, p, p, 1|d_k) linear, source slot first;
    angle (..., T, d_k/2) or dense (..., T, d_k, d_k): the base of a one-slot chain, before the gate;
    a, b (..., T, r, p, d_k);  key (..., T, p, d_k), value (..., T, d_v).
    rows: every row of the state has its own transition: the row is a batch dimension before T and d_v is 1.
    """

    key: Tensor
    value: Tensor
    gate: Tensor | None = None
    block: Tensor | None = None
    angle: Tensor | None = None
    dense: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    rows: bool = False

    @property
    def slots(self) -> int:
        return self.key.shape[-2]

    def transition(self) -> Tensor:
        """The dense maps (..., T, p d_k, p d_k), X -> X A with X flattened (slot, key)."""
        p, d = self.key.shape[-2:]
        eye = torch.eye(d, dtype=self.key.dtype, device=self.key.device)
        if self.block is not None:
            full = self.block.expand(*self.block.shape[:-1], d)
            out = full[..., :, None, :, :] * eye[:, None, :]  # (..., p, d, p, d)
            out = out.reshape(*full.shape[:-3], p * d, p * d)
        else:
            base = Element(1.0, self.gate, self.angle, self.dense)
            out = base.base(eye)
            out = out.expand(torch.broadcast_shapes(out.shape, (*self.key.shape[:-2], d, d)))
        if self.a is not None and self.b is not None:
            a, b = self.a.flatten(-2), self.b.flatten(-2)
            out = out + a.mT @ b
        return out


def chain(update: StateUpdate, signal: Signal, d_v: int) -> Chain:
    """The effective transition and write of every token. signal: batch dimensions, then T, then features.

    Starts from the monoid's element; a datum of an affine cost appends the rank-one factor a = A k (or k before the
    gate), b = -eta w k with w = 1 explicit and 1 / (1 + eta |k|^2) implicit; filters add slots.
    """
    reason = no_chain(update)
    if reason is not None:
        raise ValueError(f"not an affine chain: {reason}")
    cost, _, monoid, step, memory = update.parts()
    k, v = signal["k"], signal["v"]
    assert isinstance(k, Tensor) and isinstance(v, Tensor)
    like = k[..., None, :]
    element = monoid.element(signal, resolve(step.rate, signal), like)
    if element.angle is not None:
        element = replace(element, angle=element.angle.expand(*k.shape[:-1], element.angle.shape[-1]))
    entries = isinstance(memory, Entries)
    rows = element.outer is not None or entries or "row" in (rate_shape(step.rate), rate_shape(cost.ridge))
    lift = _Lift(rows, k.shape[:-1])

    key, value = lift.vector(k), lift.value(v)
    gate = _total_gate(element, lift, key)
    rate = lift.coefficient(resolve(step.rate, signal), rate_shape(step.rate), key)

    slots = block_size(update)
    one, zero = torch.ones_like(key[..., :1]), torch.zeros_like(key[..., :1])
    columns: list[list[Tensor]] = [[zero] * slots for _ in range(slots)]  # columns[j][i]: source i into slot j
    drives: list[Tensor] = [zero] * slots  # how much of the drive enters slot j
    current, weight = [zero] * slots, one
    ridge = cost.ridge
    if isinstance(ridge, Per) or ridge != 0.0:
        decay = lift.coefficient(resolve(ridge, signal), rate_shape(ridge), key)
        current[0] = -decay * (torch.exp(gate) if step.at == "gated" and gate is not None else one)
    slot = 0
    for f in step.via:
        branches = f.branches if isinstance(f, Sum) else (f,)
        outs = []
        for branch in branches:
            assert isinstance(branch, StateUpdate)
            slot += 1
            _, _, fm, fs, _ = branch.parts()
            fe = fm.element(signal, 1.0, like)
            kept = _total_gate(fe, lift, key, linear=True)
            enter = lift.coefficient(resolve(fs.rate, signal), rate_shape(fs.rate), key)
            columns[slot] = [enter * c for c in current]
            columns[slot][slot] = columns[slot][slot] + kept
            drives[slot] = enter * weight
            if fs.read is None:
                outs.append((columns[slot], drives[slot]))
            else:
                assert isinstance(fs.read, Read)
                read = [fs.read.rate * c for c in current]
                read[slot] = read[slot] + fs.read.gate
                outs.append((read, fs.read.rate * weight))
        weights = f.weights if isinstance(f, Sum) else (1.0,)
        current = [sum((w * o[0][i] for w, o in zip(weights, outs, strict=True)), zero) for i in range(slots)]
        weight = sum((w * o[1] for w, o in zip(weights, outs, strict=True)), zero)
    columns[0] = [rate * c for c in current]
    drives[0] = rate * weight

    into = torch.stack(_common([d * key for d in drives]), dim=-2)  # (..., T, p, d_k)
    factors: list[tuple[Tensor, Tensor]] = []
    if element.left is not None and element.right is not None:
        for u, w in zip(element.left.unbind(-1), element.right.unbind(-1), strict=True):
            factors.append((_first(lift.vector(u), slots), _first(lift.vector(w), slots)))
    shrink = one
    if update._predicts and cost.curvature == "affine":
        if step.at == "new":
            shrink = 1.0 / (1.0 + rate * (key * key).sum(-1, keepdim=True))
        if entries:
            erased = -shrink * rate * key * key
            gate_linear = torch.exp(gate) if gate is not None else one
            prior = gate_linear if step.at in ("gated", "new") else one
            columns[0][0] = columns[0][0] + gate_linear + erased * prior
            blocked = columns[0][0][..., None, None, :]
            return Chain(shrink[..., None, :] * into, value, block=blocked, rows=rows)
        seen = key
        if step.at in ("gated", "new"):
            seen = lift.vector(element.transpose_base(like)[..., 0, :])
            if element.left is not None and element.right is not None:
                seen = seen + lift.vector((element.left @ (element.right.mT @ k[..., None]))[..., 0])
            if element.outer is not None:
                seen = seen * torch.exp(lift.outer(element.outer))
        factors.append((_first(seen, slots), -shrink[..., None, :] * into))
    a = torch.stack(_common([f[0] for f in factors]), dim=-3) if factors else None
    b = torch.stack(_common([f[1] for f in factors]), dim=-3) if factors else None
    written = shrink[..., None, :] * into
    needs_block = slots > 1 or current[0] is not zero
    if not needs_block:
        angle = lift.vector(element.angle) if element.angle is not None else None
        dense = element.dense if element.dense is None or not rows else element.dense[..., None, :, :, :]
        return Chain(written, value, gate=gate, angle=angle, dense=dense, a=a, b=b, rows=rows)
    columns[0][0] = columns[0][0] + (torch.exp(gate) if gate is not None else one)
    wide = torch.broadcast_shapes(*(c.shape for col in columns for c in col))
    block = torch.stack([torch.stack([c.expand(wide) for c in col], dim=-2) for col in columns], dim=-2)
    return Chain(written, value, block=block, a=a, b=b, rows=rows)


@final
@dataclass(frozen=True)
class _Lift:
    """Moves per-token quantities into the chain's layout, with the row as a batch dimension when rows differ."""

    rows: bool
    time: tuple[int, ...]  # batch dimensions and T

    def vector(self, x: Tensor) -> Tensor:
        """(..., T, n) -> (..., [1,] T, n)."""
        return x[..., None, :, :] if self.rows else x

    def value(self, v: Tensor) -> Tensor:
        """(..., T, d_v), or (..., d_v, T, 1) by rows."""
        return v.mT[..., None] if self.rows else v

    def outer(self, gate: Tensor) -> Tensor:
        """(..., T, d_v, n) -> (..., d_v, T, n)."""
        return gate.transpose(-2, -3)

    def coefficient(self, value: Tensor | float, shape: Shape, like: Tensor) -> Tensor:
        """A rate as (..., T, 1|d_k)."""
        if not isinstance(value, Tensor) or value.ndim == 0:
            return torch.zeros_like(like[..., :1]) + value
        if shape == "row":
            return value.mT[..., None]
        lifted = value[..., None] if shape == "scalar" else value
        return self.vector(lifted)


def _total_gate(element: Element, lift: _Lift, like: Tensor, *, linear: bool = False) -> Tensor:
    """All element-wise factors of an element as one log gate (..., T, 1|d_k), or as a linear one."""
    total = torch.zeros_like(like[..., :1])
    if not isinstance(element.scale, float) or element.scale != 1.0:
        scale = torch.as_tensor(element.scale, dtype=like.dtype, device=like.device)
        if linear and element.gate is None and element.outer is None:
            return total + scale
        total = total + torch.log(scale)
    if element.gate is not None:
        total = total + (element.gate if element.gate.ndim == 0 else lift.vector(element.gate))
    if element.outer is not None:
        total = total + lift.outer(element.outer)
    return torch.exp(total) if linear else total


def _first(x: Tensor, slots: int) -> Tensor:
    """A vector on slot 0 of the chain: (..., T, d) -> (..., T, p, d)."""
    return torch.stack([x] + [torch.zeros_like(x)] * (slots - 1), dim=-2)


def _common(tensors: list[Tensor]) -> list[Tensor]:
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    return [t.expand(shape) for t in tensors]


__all__ = [
    "Chain",
    "Feedback",
    "Rate",
    "block_size",
    "chain",
    "feedback",
    "no_attention",
    "no_cascade",
    "no_chain",
    "no_gram",
    "rotate",
    "structure",
]
