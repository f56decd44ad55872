"""Wrong calls at the doors: a system of the catalogue, a small legal call of which one thing is spoilt, and what came.

A call is right if it is refused in a sentence that names what was spoilt, or gives what the reference gives for the
same input. `python -m tests.doors 1000` counts a thousand calls at every door, `python -m tests.doors cost` says what
the check of a right call costs.
"""

from __future__ import annotations

import functools
import random
import re
import sys
import timeit
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import axes
from axes import depth, dispatch, optim, sequence
from axes.core import reference
from axes.core.state_update import State
from axes.errors import AxesError
from axes.routes.given import require_call, require_packed, require_token
from axes.testing.examples import example

SEQUENCE = sequence.ALL + sequence.PREDICTED
LENGTH, HEADS, D = 4, 2, 8


class Call(NamedTuple):
    """arguments: by name, the spoilt one at a path of keys into them. run: the call. reference: what it must equal, if
    it may be answered at all."""

    arguments: dict[str, Any]
    run: Callable[..., Any]
    reference: Callable[..., Any] | None
    spoilable: tuple[tuple[str, ...], ...]


class Spoilt(NamedTuple):
    door: str
    system: str
    what: str  # which argument, and how
    outcome: str  # refused, agrees, or what is wrong

    @property
    def right(self) -> bool:
        return self.outcome in ("refused", "agrees")


# ---- ways to spoil ---------------------------------------------------------------------------------------------------


def _narrow(x: Tensor, dim: int, n: int) -> Tensor:
    return x.narrow(dim, 0, n)


TENSOR: dict[str, Callable[[Tensor], Any]] = {
    "a list": lambda x: x.tolist(),
    "a string": lambda x: "tokens",
    "a dict": lambda x: {"x": x},
    "None": lambda x: None,
    "of numpy": lambda x: x.numpy(),
    "on meta": lambda x: x.to("meta"),
    "of integers": lambda x: x.long(),
    "complex": lambda x: x.to(torch.complex64),
    "a token short": lambda x: _narrow(x, 1, x.shape[1] - 1),
    "of one token": lambda x: _narrow(x, 1, 1),
    "a head more": lambda x: torch.cat((x, x[:, :, :1]), 2) if x.ndim > 2 else torch.cat((x, x), -1),
    "wider by one": lambda x: torch.cat((x, x[..., :1]), -1),
    "narrower by one": lambda x: x[..., :-1],
    "one dimension less": lambda x: x[0],
    "one dimension more": lambda x: x[None],
    "of a larger batch": lambda x: torch.cat((x, x[:1])),
}
LAST = ("wider by one", "narrower by one")


def _other(x: Any) -> Any:
    """Of a system that keeps something else."""
    return State((x.theta[0], x.theta[0]), (), (), (), (), x.count)


def _leaf(change: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    """Every tensor of a state but counts."""
    return lambda state: pytree.tree_map(lambda x: change(x) if x.ndim else x, state)


STATE: dict[str, Callable[[Any], Any]] = {
    "a list": lambda s: [1.0, 2.0],
    "a string": lambda s: "state",
    "a dict": lambda s: {"theta": s},
    "a tensor": lambda s: torch.zeros(2, 3),
    "of numpy": lambda s: torch.zeros(2, 3).numpy(),
    "an empty tuple": lambda s: (),
    "without its last part": lambda s: tuple(s)[:-1],
    "of lists": _leaf(lambda x: x.tolist()),
    "wider by one": _leaf(lambda x: torch.cat((x, x[..., :1]), -1)),
    "of a larger batch": _leaf(lambda x: torch.cat((x, x[:1]))),
    "of float64": _leaf(lambda x: x.double()),  # one of 16 bits is held so, and legal
    "of integers": _leaf(lambda x: x.long()),
    "on meta": _leaf(lambda x: x.to("meta")),
    "of another system": lambda s: s._replace(memory=_other(s.memory)) if hasattr(s, "memory") else _other(s),
    "its parts in another order": lambda s: type(s)(*reversed(s)),
}
BOUNDS: dict[str, Callable[[Tensor], Any]] = {
    "a list": lambda x: x.tolist(),
    "a string": lambda x: "0 4",
    "None": lambda x: None,
    "of numpy": lambda x: x.numpy(),
    "on meta": lambda x: x.to("meta"),
    "of floats": lambda x: x.float(),
    "with another end": lambda x: x + torch.tensor([0] * (len(x) - 1) + [1], dtype=x.dtype),
    "falling": lambda x: x.flip(0),
    "empty": lambda x: x[:0],
    "in two dimensions": lambda x: x[None],
}
MASK: dict[str, Callable[[Tensor], Any]] = {
    n: f for n, f in TENSOR.items() if n not in ("None", "a head more", "of integers")
} | {"of floats": lambda x: x.float()}
NUMBER: dict[str, Callable[[Any], Any]] = {
    "a string": lambda x: "1",
    "a list": lambda x: [1],
    "None": lambda x: None,
    "too large": lambda x: 7,
    "negative": lambda x: -1,
}
TUPLE: dict[str, Callable[[Any], Any]] = {
    "a string": lambda x: "delta-net",
    "None": lambda x: None,
    "a class": lambda x: sequence.DeltaNet,
}
WHOLE = {n: f for n, f in TENSOR.items() if n not in ("a token short", "of one token", "a head more")
         and n not in ("of a larger batch", "one dimension less", "one dimension more")}  # fmt: skip
RATE: dict[str, Callable[[Any], Any]] = {
    "a string": lambda x: "fast", "a list": lambda x: [x], "negative": lambda x: -x, "a dict": lambda x: {"lr": x},
    "of two": lambda x: torch.ones(2), "of numpy": lambda x: torch.ones(2).numpy(),
}  # fmt: skip
PARAMS: dict[str, Callable[[Any], Any]] = {
    "a string": lambda x: "weights", "None": lambda x: None, "a number": lambda x: 1.0, "of numbers": lambda x: [1.0],
    "of numpy": lambda x: [p.detach().numpy() for p in x.parameters()], "empty": lambda x: [],
    "of integers": lambda x: [torch.zeros(2, 2, dtype=torch.int64)], "of strings": lambda x: ["weight"],
    "a dict": lambda x: {"params": list(x.parameters())}, "of triples": lambda x: [(1, 2, 3)],
}  # fmt: skip
DICT: dict[str, Callable[[Any], Any]] = {
    "a string": lambda x: "state", "None": lambda x: None, "a list": lambda x: [1], "a number": lambda x: 1,
    "empty": lambda x: {}, "a tensor": lambda x: torch.zeros(2),
}  # fmt: skip
GROUPS: dict[str, Callable[[Any], Any]] = {
    "a string": lambda x: "groups", "None": lambda x: None, "a dict": lambda x: {"lr": 1}, "a number": lambda x: 1,
    "empty": lambda x: [], "of strings": lambda x: ["lr"], "of another number": lambda x: [*x, *x],
}  # fmt: skip
NAMES: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "misspelt": lambda s, name: {(n + n[-1] if n == name else n): x for n, x in s.items()},
    "missing": lambda s, name: {n: x for n, x in s.items() if n != name},
}


# ---- doors -----------------------------------------------------------------------------------------------------------


def _signal(cls: Any, draw: random.Random, batch: int = 2, length: int = LENGTH) -> dict[str, Any]:
    made = example(cls.update, batch=(batch, HEADS), length=length, d_k=4, d_v=6, dtype=torch.float32)
    rates = {p.name: p for p in cls.update.demands()}

    def moved(name: str, x: Any) -> Any:
        return x.movedim(2, 1).contiguous() if isinstance(x, Tensor) and x.ndim > 2 else x

    names = sorted(n for n in made if n in rates or n in cls.update.signals() or n == "q")  # sets have an order a run
    return {n: moved(n, made[n]) for n in names}


def _paths(signal: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    return tuple(("signal", n) for n in signal)


def _run(cls: Any, draw: random.Random) -> Call:
    signal, state = _signal(cls, draw), None
    if draw.random() < 0.5:
        _, state = reference.run(cls.update, _signal(cls, draw), time=1)
    given = {"update": cls.update, "signal": signal, "state": state, "time": 1}

    def run(by: Any, update: Any, signal: Any, state: Any, time: Any) -> Any:
        return by(update, signal, state, time=time)

    return Call(
        given,
        lambda **a: run(dispatch.run, **a),
        lambda **a: run(reference.run, **{**a, "signal": _all_heads(a["signal"])}),
        (("update",), ("time",), *[("state",)] * (4 if state is not None else 0), *_paths(signal) * 2),
    )


def _step(cls: Any, draw: random.Random) -> Call:
    _, state = reference.run(cls.update, _signal(cls, draw), time=1)
    signal = _signal(cls, draw, length=1)
    given = {"update": cls.update, "signal": signal, "state": state}
    return Call(
        given,
        lambda update, signal, state: dispatch.step(update, signal, state),
        lambda update, signal, state: reference.run(update, _all_heads(signal), state, time=1),
        (("update",), *[("state",)] * 4, *_paths(signal) * 2),
    )


def _run_packed(cls: Any, draw: random.Random) -> Call:
    signal = _signal(cls, draw, batch=1)
    state = cls.update.init({n: x[:, 0].expand(2, *x.shape[2:]) for n, x in signal.items() if n in "kv"})
    given = {"update": cls.update, "signal": signal, "state": state, "cu_seqlens": torch.tensor([0, 1, LENGTH])}
    return Call(
        given,
        dispatch.run_packed,
        functools.partial(dispatch.run_packed, implementation="reference"),
        (("update",), *[("cu_seqlens",)] * 4, *[("state",)] * 4, *_paths(signal) * 2),
    )


def _all_heads(signal: Any) -> Any:
    """Neighbouring heads of values share the queries and keys of fewer heads."""
    heads = signal["v"].shape[2]
    return {n: x.repeat_interleave(heads // x.shape[2], 2) if n in ("q", "k") else x for n, x in signal.items()}


def _by_reference(module: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    def run(**given: Any) -> Any:
        with axes.implementation("reference"):
            return call(**given)

    return run


def _layer(cls: Any) -> Any:
    if cls not in _LAYERS:
        _LAYERS[cls] = cls(D, heads=HEADS)
    return _LAYERS[cls]


_LAYERS: dict[Any, Any] = {}


def _forward(cls: Any, draw: random.Random) -> Call:
    module, kind = _layer(cls), draw.choice(("plain", "state", "mask", "packed"))
    x = torch.randn(1 if kind == "packed" else 2, LENGTH, D)
    given: dict[str, Any] = {"x": x}
    if kind == "state":
        given["state"] = module(x)[1]
    elif kind == "mask":
        given["mask"] = torch.tensor([[True] * LENGTH, [False] + [True] * (LENGTH - 1)])
    elif kind == "packed":
        given["cu_seqlens"] = torch.tensor([0, 1, LENGTH])
    return Call(given, module, _by_reference(module, module), tuple((n,) for n in given))


def _layer_step(cls: Any, draw: random.Random) -> Call:
    module = _layer(cls)
    x = torch.randn(2, LENGTH, D)
    given = {"x": x[:, 0], "state": module(x)[1]}
    return Call(given, module.step, _by_reference(module, module.step), (("x",), ("state",)))


def _mixer(cls: Any) -> Any:
    if cls not in _LAYERS:
        _LAYERS[cls] = cls(D, layer_index=1)
    return _LAYERS[cls]


def _mixed(name: str) -> Callable[[Any, random.Random], Call]:
    """One of a mixer's four calls."""

    def door(cls: Any, draw: random.Random) -> Call:
        mixer, hidden = _mixer(cls), torch.randn(2, LENGTH, D)
        streams = mixer.expand(hidden)
        given = {"hidden": hidden} if name == "expand" else {"streams": streams}
        if name == "write":
            given |= {"y": torch.randn(2, LENGTH, D), "coefficients": mixer.read(streams)[1]}
        # a mixer without parameters is on no device: it is asked by itself
        by_itself = None if any(True for _ in mixer.parameters()) else getattr(mixer, name)
        return Call(given, getattr(mixer, name), by_itself, tuple((n,) for n in given))

    return door


def _optimizer(cls: Any, draw: random.Random) -> Call:
    model = torch.nn.Linear(4, 4)
    given = {"params": model, "lr": 0.1}
    return Call(given, lambda params, lr: cls(params, lr=lr), None, (("params",), ("lr",)))


def _load(cls: Any, draw: random.Random) -> Call:
    model = torch.nn.Linear(4, 4)
    made = cls(model)
    return Call({"state_dict": made.state_dict()}, lambda state_dict: made.load_state_dict(state_dict), None,
                (("state_dict",), ("state_dict", "state"), ("state_dict", "param_groups")))  # fmt: skip


FAMILIES = {
    "mixer.": tuple(depth.ALL),
    "optimizer": tuple(cls for cls in optim.ALL if "model" not in cls.__init__.__code__.co_varnames),
    "load": tuple(cls for cls in optim.ALL if "model" not in cls.__init__.__code__.co_varnames),
}
DOORS: dict[str, Callable[[Any, random.Random], Call]] = {
    "run": _run,
    "step": _step,
    "run_packed": _run_packed,
    "layer.forward": _forward,
    "layer.step": _layer_step,
    **{f"mixer.{name}": _mixed(name) for name in ("expand", "read", "write", "reduce")},
    "optimizer": _optimizer,
    "load_state_dict": _load,
}


# ---- a wrong call ----------------------------------------------------------------------------------------------------


def _ways(path: tuple[str, ...], x: Any) -> Mapping[str, Any]:
    name = path[-1]
    if path == ("x",):
        return WHOLE
    if path == ("state_dict", "state"):
        return {n: f for n, f in DICT.items() if n != "empty"}
    if path[0] == "signal":
        return {**TENSOR, **NAMES, "positive": lambda x: 1.5, "negative": lambda x: -1.5}
    if path == ("streams",) and isinstance(x, State):
        legal = ("of a larger batch", "of float64")  # streams keep what expand is given
        return {n: f for n, f in STATE.items() if n not in legal}
    named: dict[str, Mapping[str, Any]] = {
        "hidden": WHOLE, "streams": WHOLE, "y": WHOLE, "coefficients": TUPLE, "lr": RATE, "params": PARAMS,
        "state_dict": DICT, "param_groups": DICT if path[0] != "state_dict" else GROUPS,
        "state": STATE, "cu_seqlens": BOUNDS, "mask": MASK, "time": NUMBER, "update": TUPLE,
    }  # fmt: skip
    return named[name]


def spoil(door: str, seed: int) -> Spoilt:
    """One wrong call, drawn by a seed."""
    draw = random.Random(f"{door} {seed}")
    torch.manual_seed(seed)
    family = next((some for name, some in FAMILIES.items() if door.startswith(name)), SEQUENCE)
    cls = family[seed % len(family)]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = DOORS[door](cls, draw)
        path = draw.choice(call.spoilable)
        given = dict(call.arguments)
        old = given[path[0]] if len(path) == 1 else given[path[0]][path[1]]
        ways = _ways(path, old)
        how = draw.choice(sorted(ways))
        if how in NAMES and path[0] == "signal":
            given["signal"] = ways[how](given["signal"], path[1])
        elif len(path) == 2:
            given[path[0]] = {**given[path[0]], path[1]: ways[how](old)}
        else:
            given[path[0]] = ways[how](old)
        return Spoilt(door, cls.name, f"{path[-1]} {how}", _outcome(call, given, path[-1]))


_CALLED = {"params": "param|pass the model itself"}
_TORCHS = ("different number of parameter groups", "empty parameter list")  # sentences that torch says as well


def _outcome(call: Call, given: dict[str, Any], name: str) -> str:
    try:
        got = call.run(**given)
    except AxesError as error:
        named = re.search(_CALLED.get(name, rf"\b{name}\b"), str(error))
        return "refused" if named else f"refused without naming it: {error}"
    except Exception as error:
        if any(said in str(error) for said in _TORCHS):
            return "refused"
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if call.reference is None:
        return "accepted"
    try:
        want = call.reference(**given)
    except Exception as error:
        return f"accepted, the reference says {type(error).__name__}"
    return "agrees" if _alike(got, want) else "accepted, and differs from the reference"


def _alike(a: Any, b: Any) -> bool:
    x, y = (pytree.tree_leaves(z)[0] for z in (a, b))
    if x.device.type == "meta":
        return x.shape == y.shape and x.dtype == y.dtype
    return x.shape == y.shape and torch.allclose(x.double(), y.double(), rtol=1e-3, atol=1e-3, equal_nan=True)


def main(calls: int) -> None:
    for door in DOORS:
        found = [spoil(door, seed) for seed in range(calls)]
        counts = Counter(x.outcome.split(":")[0] for x in found)
        print(f"{door}: {calls} calls, {sum(not x.right for x in found)} wrong, {dict(counts.most_common())}")
        if "-v" in sys.argv:
            for text, n in Counter((x.what, x.outcome[:110]) for x in found if not x.right).most_common(60):
                print(f"    {n:4} {text[0]} -> {text[1]}")


def cost(call: Callable[[], Any]) -> float:
    """Microseconds of a call, the least of many short rounds: what other processes take is in the longer ones."""
    return 1e6 * min(timeit.repeat(call, number=50, repeat=1500)) / 50


def costs() -> dict[str, float]:
    """What the checks of a right call cost, by door and system."""
    found: dict[str, float] = {}
    for cls in (sequence.LinearAttention, sequence.GatedDeltaNet, sequence.RWKV7, sequence.FoX, sequence.MonetaMatrix):
        call = _run(cls, random.Random(0)).arguments
        update, signal = call["update"], call["signal"]
        state = dispatch.run(update, signal, time=1)[1]
        found[f"run {cls.name}"] = cost(lambda u=update, s=signal: require_call("run", u, s, None))  # type: ignore[misc]
        found[f"run with a state {cls.name}"] = cost(
            lambda u=update, s=signal, of=state: require_call("run", u, s, of)  # type: ignore[misc]
        )
        token, packed = _step(cls, random.Random(0)).arguments, _run_packed(cls, random.Random(0)).arguments
        found[f"step {cls.name}"] = cost(lambda a=token: require_token("step", **a))  # type: ignore[misc]
        found[f"run_packed {cls.name}"] = cost(lambda a=packed: require_packed("run", **a))  # type: ignore[misc]
        layer, x = _layer(cls), torch.randn(2, LENGTH, D)
        kept = layer(x)[1]
        found[f"layer {cls.name}"] = cost(lambda m=layer: m._check(x, 3))  # type: ignore[misc]  # noqa: B023
        found[f"layer with a state {cls.name}"] = cost(
            lambda m=layer, s=kept: (m._check(x, 3), m._check_state(s, 2, x))  # type: ignore[misc]  # noqa: B023
        )
    for mixed in (depth.MHC, depth.DenseFormer, depth.BlockAttentionResiduals):
        mixer = _mixer(mixed)
        streams = mixer.expand(torch.randn(2, LENGTH, D))
        found[f"mixer.read {mixed.name}"] = cost(lambda m=mixer, s=streams: m._matrix(s, "read"))  # type: ignore[misc]
        y, read = torch.randn(2, LENGTH, D), mixer.read(streams)[1]
        found[f"mixer.write {mixed.name}"] = cost(
            lambda m=mixer, s=streams, y=y, c=read: m._require_written(m._matrix(s, "write"), y, c)  # type: ignore[misc]
        )
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["cost"]:
        for name, took in costs().items():
            print(f"{took:6.2f} us  {name}")
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
