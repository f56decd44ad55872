"""What a sequence's caller gives, against what the tuple asks for: names, types, shapes, dtypes and devices.

The doors of `axes.routes.dispatch` and of sequence layers ask here before anything is computed. Only what the host
knows is looked at: the values of tensors are not read (of boundaries on the CPU they are, since those are read anyway).
A call that looks like one that was right is right. Nothing is asked while a compiler traces.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from numbers import Real
from operator import gt
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from axes.core.execution import SHORT, several
from axes.core.facts import fact
from axes.core.memory import Leaves
from axes.core.rates import Per, Signal, extent, resolve
from axes.core.state_update import State, StateUpdate
from axes.errors import IllegalUpdate, ShapeError, UnknownName, wrong_type

Sizes = tuple[int, ...]
_MOST = 64  # looks of a tuple's calls; past them all are forgotten
_LOGS = "a gate that tokens change is declared unit and supplied as its log"
_DOMAINS = {"unit": "the log of a gate, at most 0", "positive": "at least 0", "real": "any number"}


@final
class _Asked:
    """What a tuple asks of its calls.

    vectors: names a sequence must give.  rates: by name.  free: those that have a default.  looks: of calls that were
    found right, which are not asked again.  last: the look of the last of them, which takes half the time to compare.
    """

    def __init__(self, update: StateUpdate) -> None:
        p = update.parts()
        if not p.memory.keyed:
            raise IllegalUpdate(f"a sequence of tokens has keys and values; {update!r} takes a given gradient")
        self.update, self.listed, self.writes = update, p.memory.kind == "list", p.step.writes
        self.reads = p.step.reads
        self.repeated, self.linear = several(p), p.linear_gates()
        self.vectors = update.signals() | {"q", "k", "v"}
        self.rates = {per.name: per for per in update.demands()}
        self.free = p.memory.free
        self.looks: set[Hashable] = set()
        self.last: list[Hashable] = []

    def extents(self, d_k: int, d_v: int) -> dict[str, Sizes]:
        """The last dimensions of every name of a signal: named vectors stand on the key side."""
        own: dict[str, Sizes] = {name: (d_v if name == "v" else d_k,) for name in self.vectors}
        own |= {name: extent(per, d_k, d_v) for name, per in self.rates.items()}
        own = {name: (self.writes, *last) if name in self.repeated else last for name, last in own.items()}
        return own if self.reads == 1 else {**own, "q": (self.reads, *own["q"])}

    def form(self, d_k: int, d_v: int) -> Any:
        """The state of one sequence: the shapes of its leaves, in their place."""
        each = () if self.writes == 1 else (self.writes,)
        return _shapes(self.update.init({"k": torch.zeros(*each, d_k), "v": torch.zeros(*each, d_v)}))

    def seen(self, found: list[Hashable]) -> bool:
        """Whether a call of this look was right."""
        if tuple(found) not in self.looks:
            return False
        self.last = found
        return True

    def keep(self, found: list[Hashable]) -> None:
        if len(self.looks) >= _MOST:
            self.forget()
        self.looks.add(tuple(found))
        self.last = found

    def forget(self) -> None:
        self.looks.clear()
        self.last = []


@fact
def asked(update: StateUpdate) -> _Asked:
    """Worked out once for a tuple."""
    return _Asked(update)


def look(x: Any, found: list[Hashable]) -> bool:
    """Add how tensors, numbers and plain tuples of them look; false where something else is among them."""
    kind = x.__class__
    if kind is Tensor or kind is nn.Parameter:
        found += (x.shape, x.dtype, x.device)
    elif kind is State or kind is tuple:
        found += (kind, len(x))
        for part in x:
            of = part.__class__
            if of is Tensor:  # what is frequent, without a call
                found += (part.shape, part.dtype, part.device)
            elif of is tuple:
                found.append(len(part))
                for leaf in part:
                    if leaf.__class__ is Tensor:
                        found += (leaf.shape, leaf.dtype, leaf.device)
                    elif not look(leaf, found):
                        return False
            elif not look(part, found):
                return False
    elif kind is float or kind is int or x is None:
        found.append(x)
    else:
        return False
    return True


# ---- a call ----------------------------------------------------------------------------------------------------------


def require_call(
    who: str,
    update: StateUpdate,
    signal: Signal,
    state: State | None,
    time: int = 1,
    weights: Leaves | None = None,
) -> None:
    """AxesError unless a sequence's signal, state and weights fit the tuple and each other."""
    known, found = _looked(update, signal, (state, time, weights))
    if known is not None and (found == known.last or known.seen(found)):
        return
    lead = require_signal(who, update, signal, time)
    if state is not None or weights is not None:
        place = Place.of(lead[:time] + lead[time + 1 :], signal)
        if state is not None:
            require_state(who, update, state, place)
        if weights is not None:
            require_weights(who, update, weights, place)
    if known is not None:
        known.keep(found)


def require_packed(who: str, update: StateUpdate, signal: Signal, state: State, cu_seqlens: Tensor) -> None:
    """The same of packed sequences, which have a state each."""
    known, found = _looked(update, signal, (state, cu_seqlens))
    if known is not None and (found == known.last or known.seen(found)):
        _require_rising(who, cu_seqlens, "k and v", signal["v"].shape[1])  # type: ignore[union-attr]
        return
    lead = require_signal(who, update, signal)
    require_bounds(who, cu_seqlens, "k and v", lead, signal["v"].device)  # type: ignore[union-attr]
    require_state(who, update, state, Place.of((cu_seqlens.shape[0] - 1, *lead[2:]), signal))
    if known is not None:
        known.keep(found)


def _looked(update: StateUpdate, signal: Signal, beside: Any) -> tuple[_Asked | None, list[Hashable]]:
    """How a call looks, and who knows the looks of right ones; None where a look does not say all."""
    found: list[Hashable] = []
    if update.__class__ is not StateUpdate or signal.__class__ is not dict:
        return None, found
    known = asked(update)
    right = look(beside, found)
    for name, x in signal.items():
        found.append(name)
        right = right and look(x, found)
    return known if right else None, found


def require_token(who: str, update: StateUpdate, signal: Signal, state: State) -> None:
    """The same of one token in dimension 1."""
    if state is None:
        raise wrong_type(who, "state", "a State, as init or an earlier call returned it", state)
    require_call(who, update, signal, state)
    v = signal["v"]
    assert isinstance(v, Tensor)
    if v.shape[1] != 1:
        raise ShapeError(f"{who}: one token has 1 in dimension 1 of q, k and v, not {v.shape[1]}: call run")


# ---- signals ---------------------------------------------------------------------------------------------------------


def require_signal(who: str, update: StateUpdate, signal: Signal, time: int = 1) -> Sizes:
    """AxesError unless a signal has what the tuple asks for, and nothing else, of shapes that fit; the leading
    dimensions of its pairs, with time.

    Dimensions: batch and `time` as in v (B, T, H, d_v), wherever time stands; one of size 1 stands for all of a batch
    dimension, never for all tokens. q and k may have fewer heads, of which v has a multiple. A number is a
    constant rate, and so is a tensor of no more dimensions than `time` without those of batch and heads.
    """
    if not isinstance(update, StateUpdate):
        raise wrong_type(who, "update", "a StateUpdate (of a layer: layer.update)", update)
    if not isinstance(signal, Mapping):
        raise wrong_type(who, "signal", "a mapping of names to tensors", signal)
    known = asked(update)
    rates = known.rates
    for name in signal:
        if name not in rates and name not in known.vectors:
            raise UnknownName(f"name in the signal of {who}", str(name), known.vectors.union(rates))
    for name in sorted(known.vectors):
        x = signal.get(name)
        if not isinstance(x, Tensor):
            if name not in signal:
                wanted = sorted(known.vectors)
                raise ShapeError(f"{who} needs {name!r} in the signal, of {wanted}; it has {sorted(signal)}")
            raise wrong_type(who, name, f"a tensor ({'' if time else 'T, '}..., width)", x)
    v, k = signal["v"], signal["k"]
    assert isinstance(v, Tensor) and isinstance(k, Tensor)
    if not isinstance(time, int):
        raise wrong_type(who, "time", "the number of a dimension", time)
    if not 0 <= time <= v.ndim - 2 or not k.ndim:
        raise ShapeError(
            f"{who}: time is a dimension before the last of v, whose shape is {tuple(v.shape)}, not {time}: "
            "v is (B, T, H, d_v) with time=1"
        )
    if known.writes > 1 and (v.ndim < time + 3 or k.ndim != v.ndim or v.shape[-2] != known.writes):
        given = f"k {tuple(k.shape)} and v {tuple(v.shape)}"
        raise ShapeError(f"{who}: {known.writes} writes a token stand ahead of the width of k and v, got {given}")
    pairs = (k, v) if known.writes == 1 else (k[..., 0, :], v[..., 0, :])
    extents, lead, device = known.extents(k.shape[-1], v.shape[-1]), _pairs_lead(*pairs), v.device
    for name, per in rates.items():
        if name not in signal:
            if name not in known.free:
                resolve(per, signal)  # which says what is missing
        elif not isinstance(x := signal[name], Tensor):
            _require_number(who, per, x)
    for name, x in signal.items():
        if not isinstance(x, Tensor):
            continue
        last = extents[name]
        if name in known.linear and x.ndim > time:
            raise IllegalUpdate(f"{who}: gate {name!r} is {rates[name].domain}, one number for all tokens: " + _LOGS)
        if x.shape != lead + last if last else x.shape != lead:
            _require_fit(who, name, signal, last, lead, time, name not in rates)
        if not x.is_floating_point():
            raise ShapeError(f"{who}: {name} must be floating point, got {x.dtype}: convert it, as by {name}.float()")
        if x.device != device and (x.ndim or x.is_meta or x.device.type != "cpu"):
            raise ShapeError(f"{who}: {name} is on {x.device} and v on {device}: move one of them")
    return lead


def _require_number(who: str, per: Per, x: object) -> None:
    if not isinstance(x, Real):
        raise wrong_type(who, per.name, f"a number or a tensor ({per.shape}, {per.domain})", x)
    number = float(x)
    if per.domain == "unit" and number > 0 or per.domain == "positive" and number < 0:
        raise ShapeError(f"{who}: {per.name} is {per.domain}, {_DOMAINS[per.domain]}, not {x}")


def _pairs_lead(k: Tensor, v: Tensor) -> Sizes:
    """The dimensions of k and v but the last, where one of size 1 stands for all of the other's."""
    lead = v.shape[:-1]
    return lead if k.shape[:-1] == lead or k.ndim != v.ndim else tuple(map(max, k.shape[:-1], lead))


def _require_fit(who: str, name: str, signal: Signal, last: Sizes, lead: Sizes, time: int, vector: bool) -> None:
    """ShapeError unless the tensor of this name stands for all of (*lead, *last)."""
    x = signal[name]
    assert isinstance(x, Tensor)
    got, n = tuple(x.shape), x.ndim - len(last)
    hint = ""
    if not vector and x.ndim <= time:  # constant in time
        if not x.ndim or got == last:
            return
    elif n == len(lead) and got[n:] == last and got[time] == lead[time]:
        heads = len(lead) - 1
        shares = name in ("q", "k") and heads > time and 0 < got[heads] < lead[heads] and len(last) == 1

        def stands(i: int, a: int, b: int) -> bool:
            many = shares and i == heads and not b % a or name == "q" and b == 1  # queries that read one memory
            return a == b or i != time and (a == 1 or many)

        if all(stands(i, got[i], lead[i]) for i in range(n)):
            return
        if shares and lead[heads] % got[heads]:
            hint = f": {name} has {got[heads]} heads and v {lead[heads]}, which is not a multiple"
    given = ", ".join(f"{n} {tuple(y.shape)}" for n in "qkv" if isinstance(y := signal.get(n), Tensor) and n != name)
    rates = "" if vector else f"; a number, or a tensor {last}, stands for all"
    wanted = ", ".join(map(str, (*lead, *last)))
    raise ShapeError(
        f"{who}: {name} must be ({wanted}) beside {given}, with time in dimension {time}, got {got}{hint}{rates}"
    )


def _spreads(got: Sizes, over: Sizes) -> bool:
    return len(got) == len(over) and all(a in (1, b) for a, b in zip(got, over, strict=True))


# ---- states ----------------------------------------------------------------------------------------------------------


def _shapes(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.shape
    made = [_shapes(part) for part in x]
    return type(x)(*made) if isinstance(x, State) else tuple(made)


class Place(NamedTuple):
    """Where a state stands: a memory for each of a batch (batch, heads), keys and values of these widths, and the dtype
    and device of the values. shared: statistics of what is the same for the whole batch may have no batch. held: the 16
    bits that a state is held in."""

    batch: Sizes
    d_k: int
    d_v: int
    dtype: torch.dtype
    device: torch.device
    shared: bool = False
    held: torch.dtype | None = None

    @classmethod
    def of(cls, batch: Sizes, signal: Signal) -> Place:
        k, v = signal["k"], signal["v"]
        assert isinstance(k, Tensor) and isinstance(v, Tensor)
        return cls(batch, k.shape[-1], v.shape[-1], v.dtype, v.device)

    def told(self, form: Sizes) -> str:
        wanted = ", ".join(map(str, (*self.batch, *form)))
        return f"must be ({wanted}) for this tuple beside k of width {self.d_k} and v of width {self.d_v}"


def require_state(who: str, update: StateUpdate, state: object, place: Place, name: str = "state") -> None:
    """AxesError unless this is a state of the tuple in this place. Lists keep a dtype of their own."""
    if not isinstance(state, State):
        raise wrong_type(who, name, "a State, as init or an earlier call returned it", state)
    form = asked(update).form(place.d_k, place.d_v)
    if asked(update).listed:
        _require_list(who, f"{name}.theta", state.theta, place)
        _require_part(who, f"{name}.count", state.count, form.count, place)
        return
    if place.dtype != torch.float64:
        leaves = state.theta if isinstance(state.theta, tuple) else ()
        place = place._replace(held=next((x.dtype for x in leaves if getattr(x, "dtype", None) in SHORT), None))
    _require_part(who, name, state, form, place)


def _require_part(who: str, name: str, x: Any, form: Any, place: Place) -> None:
    """What stands where a form has a shape or parts. Counts are integers, of the host where there is
    one for all sequences."""
    if form.__class__ is torch.Size:
        if not isinstance(x, Tensor):
            raise wrong_type(who, name, "a tensor", x)
        if not form:
            each = x.shape == place.batch[:1] and len(place.batch) > 0  # a count for every sequence
            if x.ndim and not each or x.is_floating_point() or x.is_meta:
                got = f"{x.dtype} {tuple(x.shape)} on {x.device}"
                raise ShapeError(f"{who}: {name} must be an integer of no dimensions on the host, got {got}")
            return
        if x.shape != place.batch + form:
            _require_batch(who, name, x, form, place)
        if x.dtype != (place.held or (torch.float64 if place.dtype == torch.float64 else torch.float32)):
            raise ShapeError(
                f"{who}: {name} is {x.dtype}: a state is float64 beside float64, else float32, or held in 16 bits as a "
                "whole, by state.to(torch.bfloat16)"
            )
        if x.device != place.device:
            raise ShapeError(f"{who}: {name} is on {x.device} and the input on {place.device}: move one of them")
        return
    kind = State if form.__class__ is State else tuple
    if not isinstance(x, kind):
        raise wrong_type(who, name, f"a {kind.__name__}, as init makes it", x)
    if len(x) != len(form):
        raise ShapeError(f"{who}: {name} has {len(x)} parts, in a state of this tuple {len(form)}: is it another's?")
    if form:
        for part, y, wanted in zip(State._fields if kind is State else range(len(form)), x, form, strict=True):
            _require_part(who, f"{name}.{part}" if kind is State else f"{name}[{part}]", y, wanted, place)


def _require_batch(who: str, name: str, x: Tensor, form: Sizes, place: Place) -> None:
    """ShapeError unless dimensions of size 1 stand for those of the batch."""
    n, got, batch = x.ndim - len(form), tuple(x.shape), place.batch
    if n >= 0 and got[n:] == form:
        if _spreads(got[:n], batch) or n == 0 and place.shared:
            return
        if n == len(batch) and got[1:n] == batch[1:]:
            raise ShapeError(f"{who}: got a state of {got[0]} sequences for {batch[0]}: {name} is {got}")
    raise ShapeError(f"{who}: {name} {place.told(form)}, got {got}")


def _require_list(who: str, name: str, theta: object, place: Place) -> None:
    """Keys (n, d_k), values (n, d_v), log masses (n) and what may be owed (d_k/2), of every sequence."""
    if not isinstance(theta, tuple):
        raise wrong_type(who, name, "a tuple of tensors", theta)
    if len(theta) not in (3, 4):
        raise ShapeError(f"{who}: {name} has {len(theta)} parts, a list keys, values, masses and what is owed")
    for i, x in enumerate(theta):
        if not isinstance(x, Tensor):
            raise wrong_type(who, f"{name}[{i}]", "a tensor", x)
    n = theta[2].shape[-1] if theta[2].ndim else 0
    for i, (x, form) in enumerate(zip(theta, ((n, place.d_k), (n, place.d_v), (n,), (place.d_k // 2,)), strict=False)):
        if x.shape != place.batch + form:
            _require_batch(who, f"{name}[{i}]", x, form, place)
        if not x.is_floating_point():
            raise ShapeError(f"{who}: {name}[{i}] must be floating point, got {x.dtype}")
        if i < 2 and x.dtype == torch.float64 != place.dtype:
            raise ShapeError(f"{who}: {name}[{i}] is float64 beside {place.dtype}: convert one of them")
        if x.device != place.device:
            raise ShapeError(f"{who}: {name}[{i}] is on {x.device} and the input on {place.device}: move one of them")


def require_weights(who: str, update: StateUpdate, weights: object, place: Place) -> None:
    """AxesError unless these are leaves theta_0 of the tuple, whose leading dimensions stand for all of the batch."""
    form = asked(update).form(place.d_k, place.d_v).theta
    if asked(update).listed:  # pairs, as many as there are
        _require_list(who, "weights", weights, place)
        return
    if not isinstance(weights, tuple):
        raise wrong_type(who, "weights", "a tuple of tensors", weights)
    if len(weights) != len(form):
        raise ShapeError(f"{who}: weights has {len(weights)} parts, in a state of this tuple {len(form)}")
    for i, (x, last) in enumerate(zip(weights, form, strict=True)):
        if not isinstance(x, Tensor):
            raise wrong_type(who, f"weights[{i}]", "a tensor", x)
        n = len(place.batch) + len(last) - x.ndim  # dimensions that it has not
        if x.shape != place.batch + last and not (n > 0 and place.batch[:n] and x.shape == place.batch[n:] + last):
            _require_batch(who, f"weights[{i}]", x, last, place)
        if not x.is_floating_point():
            raise ShapeError(f"{who}: weights[{i}] must be floating point, got {x.dtype}")


# ---- packed sequences ------------------------------------------------------------------------------------------------


def require_bounds(who: str, cu_seqlens: object, name: str, lead: Sizes, device: torch.device) -> None:
    """AxesError unless these are the boundaries (N + 1,) of sequences packed in what is named, (1, T, ...) = lead.

    Their values are read on the CPU alone: elsewhere that would wait for the device.
    """
    if not isinstance(cu_seqlens, Tensor):
        raise wrong_type(who, "cu_seqlens", "a tensor (N + 1,) of int32 or int64", cu_seqlens)
    if lead[0] != 1:
        raise ShapeError(f"{who}: packed input has B = 1, got {lead[0]}: {name} and what is beside it with cu_seqlens")
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.ndim != 1 or not cu_seqlens.numel():
        got = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        raise ShapeError(f"{who}: cu_seqlens must be int32 or int64 of shape (N + 1,), got {got}")
    if cu_seqlens.device != device:
        raise ShapeError(f"{who}: cu_seqlens is on {cu_seqlens.device}, {name} on {device}: move one of them")
    _require_rising(who, cu_seqlens, name, lead[1])


def _require_rising(who: str, cu_seqlens: Tensor, name: str, length: int) -> None:
    if cu_seqlens.device.type != "cpu":
        return
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != length or any(map(gt, ends, ends[1:])):
        raise ShapeError(f"{who}: cu_seqlens must rise from 0 to T = {length}, the tokens of {name}, got {ends}")


__all__ = [
    "Place", "asked", "look", "require_bounds", "require_call", "require_packed", "require_state", "require_token",
]  # fmt: skip
