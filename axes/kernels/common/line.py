"""A call that looks like one before it asks torch and the GPU for the same again: written down once, then followed.

What a layer asks for depends on what its tensors look like, never on what they hold: a straight line of operations,
allocations and launches. The first call of a look runs as ever, the second is written down while it runs (below
autograd, where everything is an operation, gradients included), and from then on the line is followed, one function
forward and one backward, without the Python that had decided on it. Results are the same bits.

Views cost nothing: only those that something reads are made, each from its storage. What a line cannot say (a value
read on the host, a tensor from elsewhere, a write to what was given) leaves a look to the Python for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from hashlib import sha256
from typing import Any, NamedTuple, final
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

from axes.kernels.common.launcher import Launch, Tiles, here

_aten = torch.ops.aten
_BY_VALUE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_SEEDED = torch.Tag.nondeterministic_seeded
_LONGEST = 2000  # steps: more is a loop over tokens
_LARGEST = 2**23  # entries of what a line holds from call to call

# ---- what is written -------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """A tensor of the line: a root, which is given or made by an operation, or a view of one."""

    root: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Again(NamedTuple):
    """A result that another one is too: of the same memory, but a tensor of its own."""

    base: _Place


class _Step(NamedTuple):
    """function(*args, **kwargs), in which places stand for tensors. made: roots, in the order of the results."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[int | None, ...]
    several: bool


# rooms, by what fills them: they need nobody to be like
_ROOMS: dict[Any, Callable[..., Any]] = {
    _aten.empty.memory_format: torch.empty_strided,
    _aten.empty_strided.default: torch.empty_strided,
    _aten.empty_like.default: torch.empty_strided,
    _aten.new_empty.default: torch.empty_strided,
    _aten.new_empty_strided.default: torch.empty_strided,
    _aten.zeros.default: torch.zeros,
    _aten.zeros_like.default: torch.zeros,
    _aten.new_zeros.default: torch.zeros,
    _aten.ones.default: torch.ones,
    _aten.ones_like.default: torch.ones,
}
_UNREAD = (torch.empty_strided, torch.zeros, torch.ones)  # left out if nobody reads what they make
# the same by torch's own bindings, which cost the host half as much as an overload
_BINDINGS = {
    _aten.mm.default: torch.mm,
    _aten.mm.out: torch.mm,
    _aten.addmm.default: torch.addmm,
    _aten.addmm_.default: Tensor.addmm_,
    _aten.bmm.default: torch.bmm,
    _aten.add.Tensor: torch.add,
    _aten.add_.Tensor: Tensor.add_,
    _aten.mul.Tensor: torch.mul,
    _aten.sub.Tensor: torch.sub,
    _aten.div.Tensor: torch.div,
    _aten.neg.default: torch.neg,
    _aten.exp.default: torch.exp,
    _aten.cat.default: torch.cat,
    _aten.stack.default: torch.stack,
    _aten.sum.dim_IntList: torch.sum,
    _aten.zero_.default: Tensor.zero_,
    _aten.copy_.default: Tensor.copy_,
    _aten.clone.default: torch.clone,
    _aten._foreach_copy_.default: torch._foreach_copy_,
    _aten.full.default: torch.full,
    _aten.where.self: torch.where,
    _aten.eq.Scalar: torch.eq,
    _aten.eq.Tensor: torch.eq,
    _aten.ne.Scalar: torch.ne,
    _aten.pow.Tensor_Scalar: torch.pow,
    _aten.abs.default: torch.abs,
    _aten.cos.default: torch.cos,
    _aten.sin.default: torch.sin,
    _aten.tanh.default: torch.tanh,
    _aten.sigmoid.default: torch.sigmoid,
    _aten.rsqrt.default: torch.rsqrt,
    _aten.addcmul.default: torch.addcmul,
    _aten.roll.default: torch.roll,
    _aten.flip.default: torch.flip,
    _aten.cumsum.default: torch.cumsum,
    _aten.clamp_min.default: torch.clamp_min,
    _aten.ge.Scalar: torch.ge,
}
_CAST = {"dtype", "layout", "device", "pin_memory"}  # of a cast from dtype to dtype


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple | list):
        for y in x:
            yield from _tensors(y)
    elif isinstance(x, dict):
        yield from _tensors(tuple(x.values()))
    elif hasattr(x, "block_shape"):
        yield x.base


@final
class Recorder(TorchDispatchMode):
    """Writes down what is asked for while it is on. refused: why there is no line, or None."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self.roots: list[_Place] = []
        self.given: set[int] = set()
        self.varied: set[int] = set()  # roots that an operation draws, or writes to
        self.refused: str | None = None
        self._storages: dict[int, tuple[StorageWeakRef, dict[Any, _Place]]] = {}  # weak: an address is not used again
        self.give(given)

    def give(self, given: Sequence[Tensor]) -> list[int]:
        """Roots for tensors that no step makes."""
        if any(_address(x) in self._storages for x in given) or len({_address(x) for x in given}) < len(given):
            self.refuse("tensors that are given share memory")
        made = [self._root(x) for x in given]
        self.given.update(made)
        return made

    def refuse(self, reason: str) -> None:
        self.refused = self.refused or reason

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler at the first operation, which takes seconds

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if self.refused is None:
            self._write(function, args, kwargs or {}, made)
        if len(self.steps) > _LONGEST:
            self.refuse("it is too long")
        return made

    def launch(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """A launch of a kernel, which writes to tensors of the line. It takes addresses, so that no view need be made
        of what begins where a root does."""
        if self.refused is None:
            begins = [self._begins(self._places(x)) for x in args]
            self.steps.append(_Step(function, tuple(begins), self._places(kwargs), (), False))

    def call(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        """A call that may write to tensors of the line, which it is given as they are."""
        if self.refused is None:
            self.steps.append(_Step(function, self._places(tuple(args)), {}, (), False))

    def place(self, x: Tensor) -> _Place:
        """Where x stands on the line."""
        held = self._storages.get(_address(x))
        if held is None:
            self.refuse(f"a tensor {tuple(x.shape)} comes from elsewhere")
            return _Place(0, (), (), 0)
        places = held[1]
        first = next(iter(places))
        if first[0] != x.dtype or x.is_conj() or x.is_neg():
            self.refuse(f"a view of {first[0]} as {x.dtype}")
        made = _Place(places[first].root, tuple(x.shape), x.stride(), int(x.storage_offset()))
        return places.setdefault(_meta(x), made)

    def whole(self, place: _Place) -> _Place:
        """The root itself where a view of it differs by steps that nobody takes."""
        root = self.roots[place.root]
        return root if _steps(place) == _steps(root) else place

    def _root(self, x: Tensor) -> int:
        place = _Place(len(self.roots), tuple(x.shape), x.stride(), int(x.storage_offset()))
        self.roots.append(place)
        self._storages[_address(x)] = StorageWeakRef(x.untyped_storage()), {_meta(x): place}
        return place.root

    def _begins(self, x: Any) -> Any:
        root = self.roots[x.root] if isinstance(x, _Place) else None
        return root if root is not None and root.offset == x.offset else x

    def _write(self, function: Any, args: Any, kwargs: dict[str, Any], made: Any) -> None:
        several = isinstance(made, tuple | list)
        results, schema = list(made) if several else [] if made is None else [made], function._schema
        if not _BY_VALUE.isdisjoint(function.tags):
            return self.refuse(f"what {function} says depends on values")
        read, drawn = {_address(x) for x in _tensors((*args, *kwargs.values()))}, _SEEDED in function.tags
        fresh = [isinstance(x, Tensor) and _address(x) not in read for x in results]  # numbers are those of a look
        if schema.is_mutable:
            written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            values = dict(zip([a.name for a in schema.arguments], args, strict=False)) | kwargs
            changed = {self.place(x).root for name in written for x in _tensors(values.get(name))}
            if changed & self.given:
                return self.refuse(f"{function} writes to what was given")
            self.varied |= changed
        elif not any(fresh):  # views, or what is asked about dtypes
            for x in _tensors(results):
                self.place(x)
            return None
        first, room = next(_tensors(results), None), _ROOMS.get(function)
        if first is not None and room is not None and (room is torch.empty_strided or first.is_contiguous()):
            sizes = (tuple(first.shape), first.stride())[: 2 if room is torch.empty_strided else 1]
            function, args, kwargs = room, sizes, _kind(first)
        elif first is not None and not read:
            kwargs = {**kwargs, **_kind(first)}
        elif function is _aten.add.Tensor and self._is_zero(args[0]) and type(args[1]) is int and not kwargs:
            function, args, kwargs = torch.full, (tuple(made.shape), args[1]), _kind(made)
        elif function is _aten._to_copy.default and kwargs.keys() <= _CAST and made.device == args[0].device:
            alike = made.dtype == args[0].dtype  # then a copy is what was asked for
            function, args, kwargs = (function, args, kwargs) if alike else (Tensor.to, (args[0], made.dtype), {})
        given = self._places(args), self._places({n: x for n, x in kwargs.items() if x is not None})
        roots = [
            self._root(x) if new and _address(x) not in self._storages else None
            for x, new in zip(results, fresh, strict=True)
        ]
        for x in _tensors(results):
            self.place(x)
        if drawn:
            self.varied.update(root for root in roots if root is not None)
        self.steps.append(_Step(_BINDINGS.get(function, function), *given, tuple(roots), several))
        return None

    def _is_zero(self, x: Tensor) -> bool:
        """Whether it is a tensor of integers that was made of zeros and of which nothing has been said since."""
        root = self.place(x).root
        said = [s for s in self.steps if root in s.made or any(p.root == root for p in _placed((s.args, s.kwargs)))]
        return not x.is_floating_point() and len(said) == 1 and said[0].function is torch.zeros

    def _places(self, x: Any) -> Any:
        """x with places in the place of tensors."""
        if isinstance(x, Tensor):
            return self.place(x)
        if isinstance(x, dict):
            return {name: self._places(y) for name, y in x.items()}
        if isinstance(x, tuple | list):
            inside = [self._places(y) for y in x]
            return type(x)(*inside) if hasattr(x, "_fields") else type(x)(inside)
        if hasattr(x, "block_shape") and isinstance(getattr(x, "base", None), Tensor):
            rest = {name: y for name, y in x.__dict__.items() if name != "base"}
            return Tiles(type(x), rest, self.place(x.base))
        return x


def _address(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _meta(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.storage_offset(), x.shape, x.stride()


def _kind(x: Tensor) -> dict[str, Any]:
    return {"dtype": x.dtype, "device": x.device}


def recording() -> Recorder | None:
    """What writes down, if anything does."""
    if not torch._C._len_torch_dispatch_stack():
        return None
    mode = _get_current_dispatch_mode()
    return mode if type(mode) is Recorder else None


def unseen() -> AbstractContextManager[Any]:
    """Within the block nothing is written down."""
    return nullcontext() if recording() is None else _disable_current_modes()


def called(function: Callable[..., None], *args: Any) -> None:
    """function(*args), which a line that is being written repeats as it is: an exchange with other processes, say.

    It writes to tensors that are given, at most, and makes none that outlives it.
    """
    recorder = recording()
    with unseen():
        function(*args)
    if recorder is not None:
        recorder.call(function, args)


# ---- what is followed ------------------------------------------------------------------------------------------------


_Follow = Callable[[list[Tensor]], Any]


def _quick(step: _Step, roots: Sequence[_Place], device: torch.device) -> _Step:
    """A room by the entrance that the code of torch's compiler takes, which does not ask what is known; what fills one
    with zeros, a number or another dtype by that and an operation in place, half of what torch takes for it."""
    entrance = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    filled = _FILLED.get(step.function)
    if entrance is None or step.function is not torch.empty_strided and filled is None or step.made[0] is None:
        return step
    if step.function is Tensor.to:
        dtype = step.args[1]
    elif step.kwargs["device"] == device:
        dtype = step.kwargs["dtype"]
    else:
        return step
    place = roots[step.made[0]]
    room = (place.size, place.stride, dtype)
    if filled is None:
        return step._replace(function=entrance, args=room, kwargs={})
    number, fill = filled

    def made(given: Any) -> Any:
        return fill(entrance(*room), given)

    return step._replace(function=made, args=(step.args[number] if number is not None else 0,), kwargs={})


# by what fills a room: which of its arguments with, and the operation in place
_FILLED: dict[Any, tuple[int | None, Callable[..., Any]]] = {
    torch.zeros: (None, Tensor.fill_),
    torch.full: (1, Tensor.fill_),
    Tensor.to: (0, Tensor.copy_),
}
# a view without asking what torch's dispatcher would: size, stride, and how much later than the tensor it begins
_view = getattr(torch._C._dynamo.guards, "_reinterpret_tensor", None) or (
    lambda x, size, stride, later: torch.as_strided(x, size, stride, x.storage_offset() + later)
)


def _function(
    given: Sequence[int],
    steps: Sequence[_Step],
    results: Any,
    roots: Sequence[_Place],
    device: torch.device,
    fixed: Mapping[int, Tensor | None],
) -> _Follow:
    """The steps as a function of a list of given roots, which it empties; results: places, which come back in their
    structure. A tensor is let go of behind the step that reads it last. fixed: roots that are there."""
    known: dict[str, Any] = {"view": _view, "described": _described, "again": Tensor.detach, "here": here}
    names = "".join(f"t{root}, " for root in given)
    lines = [[f"{names} = tensors" if names else "", "tensors.clear()"]]
    last: dict[str, int] = {}
    views: dict[_Place, str] = {}

    def constant(x: Any) -> str:
        name = f"c{len(known)}"
        known[name] = x
        return name

    def text(x: Any, read: str = "{}") -> str:
        if isinstance(x, _Place) and x.root in fixed:
            if x not in views:
                views[x] = constant(_seen(fixed[x.root], x, roots))
            return read.format(views[x])
        if isinstance(x, _Place):
            name = root = f"t{x.root}"
            if x != roots[x.root] and (name := views.get(x, "")) == "":
                name = views[x] = f"v{len(views)}"
                later = x.offset - roots[x.root].offset
                lines[-1].append(f"{name} = view({root}, {x.size}, {x.stride}, {later})")
                last[root] = len(lines) - 1
            last[name] = len(lines) - 1
            return read.format(name)
        if isinstance(x, _Again):
            return f"again({text(x.base)})"
        if isinstance(x, Tiles):
            return f"described({constant(x.cls)}, {constant(x.rest)}, {text(x.base)})"
        if x is None or type(x) in (bool, int, str):
            return repr(x)
        if isinstance(x, tuple | list) and next(_placed(x), None) is not None:
            inside = "".join(f"{text(y, read)}, " for y in x)
            if hasattr(x, "_fields"):
                return f"{constant(type(x))}({inside})"
            return f"({inside})" if isinstance(x, tuple) else f"[{inside}]"
        return constant(x)

    def address(x: Any) -> str:
        return text(x, "{}.data_ptr()")

    steps = [step for step in steps if fixed.keys().isdisjoint(step.made)]
    needed = {place.root for place in _placed((results, *[(step.args, step.kwargs) for step in steps]))}
    for step in steps:
        if step.function in _UNREAD and step.made[0] not in needed:
            continue
        step = _quick(step, roots, device)
        lines.append([])
        if isinstance(step.function, Launch):
            call = step.function.text(step.args, constant, address)
            if call is not None:
                lines[0][2:] = [f"stream, enter, leave = here({device.index})"]
                lines[-1].append(call)
                continue
        asked = [text(x) for x in step.args] + [f"{name}={text(x)}" for name, x in step.kwargs.items()]
        call = f"{constant(step.function)}({', '.join(asked)})"
        made = ["_" if root is None else f"t{root}" for root in step.made]
        if any(root is not None for root in step.made):
            call = f"{''.join(f'{name}, ' for name in made) if step.several else made[0]} = {call}"
            last.update({name: len(lines) - 1 for name in made})
        lines[-1].append(call)
    lines.append([])
    lines[-1].append(f"return {text(results)}")
    for name, line in last.items():
        if line < len(lines) - 1:
            lines[line].append(f"del {name}")
    body = "".join(f"    {line}\n" for group in lines for line in group)
    exec(f"def follow(tensors):\n{body}", known)
    found: _Follow = known["follow"]
    return found


def _placed(x: Any) -> Iterator[_Place]:
    if isinstance(x, _Place):
        yield x
    elif isinstance(x, Tiles | _Again):
        yield x.base
    elif isinstance(x, tuple | list):
        for y in x:
            yield from _placed(y)
    elif isinstance(x, dict):
        yield from _placed(tuple(x.values()))


def _seen(x: Tensor | None, place: _Place, roots: Sequence[_Place]) -> Tensor:
    """A view of a root that is there."""
    assert x is not None, "what only makes what is held is not read"
    root = roots[place.root]
    return x if place == root else _view(x, place.size, place.stride, place.offset - root.offset)


# ---- what is the same at every call ----------------------------------------------------------------------------------

# rooms, numbers and copies: a kernel may write to these, and never to what an operation computed
_TO_FILL = {*_UNREAD, torch.full, torch.clone, _aten._to_copy.default}
_computed: WeakValueDictionary[Any, Tensor] = WeakValueDictionary()  # of all lines, by how they are computed
_captured: dict[int, Tensor] = {}  # what graphs of CUDA read, which outlive lines


def _fixed(recorder: Recorder, handed: Sequence[Any], device: torch.device) -> dict[int, Tensor | None]:
    """What the line computes of numbers alone, as a table of positions, by its root: made now and held. What is handed
    out is made at every call. In a capture nothing is there before the graph runs, so that nothing is held."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return {}
    roots = recorder.roots
    out, texts = {place.root for place in _placed(handed)} | recorder.varied, dict[int, str]()
    open_to = {p.root for s in recorder.steps if not s.made for p in _placed((s.args, s.kwargs))}  # launches and calls
    chain: list[_Step] = []
    for step in recorder.steps:
        read = [place.root for place in _placed((step.args, step.kwargs))]
        stays = step.made and None not in step.made and out.isdisjoint(step.made) and texts.keys() >= set(read)
        written = step.function in _TO_FILL and not open_to.isdisjoint(step.made)
        if not stays or written or step.function is torch.empty_strided:
            continue
        chain.append(step)
        told = sha256(_said(step, texts).encode()).hexdigest()
        texts.update({root: f"{told}[{i}]" for i, root in enumerate(step.made) if root is not None})
    inside = {id(step) for step in chain}
    rest = [(s.args, s.kwargs) for s in recorder.steps if id(s) not in inside]
    ends = list(dict.fromkeys(p.root for p in _placed(rest) if p.root in texts))
    if sum(1 + _span(roots[root]) for root in ends) > _LARGEST or not ends:
        return {}
    keys = {root: (texts[root], roots[root][1:], str(device)) for root in ends}
    held = {root: _computed.get(key) for root, key in keys.items()}
    if None in held.values():
        with torch.inference_mode(False):
            made = _function((), chain, tuple(roots[root] for root in ends), roots, device, {})([])
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # calls may come on any stream
        held = {root: _computed.setdefault(keys[root], x) for root, x in zip(ends, made, strict=True)}
    return {root: held.get(root) for root in texts}


def _said(step: _Step, texts: dict[int, str]) -> str:
    """A step by what it is made of, whichever line it stands in."""

    def text(x: Any) -> str:
        if isinstance(x, _Place):
            return f"{texts[x.root]}{x[1:]}"
        if isinstance(x, tuple | list):
            return f"{type(x)}{list(map(text, x))}"
        return repr(x)

    return f"{step.function}{text(step.args)}{[(name, text(x)) for name, x in sorted(step.kwargs.items())]}"


def _described(cls: type, rest: dict[str, Any], base: Tensor) -> Any:
    made: Any = object.__new__(cls)
    made.__dict__.update(rest, base=base)
    return made


_OUTSIDE = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
for _key in ("AutocastCPU", "AutocastCUDA"):
    _OUTSIDE = _OUTSIDE | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _key))


# ---- forward and backward --------------------------------------------------------------------------------------------


@final
class Line:
    """One look of a function, `function(*tensors)`, which is given at every call and does the same for all.

    refused: why it is left to Python, or None.  ready: whether it is followed; with gradients that takes a backward.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.cast = device, cast(device)
        self.refused: str | None = None
        self.ready = False
        self._recorder: Callable[[], Recorder | None] = lambda: None
        self._structure: Callable[..., Any]  # of the results, made of their tensors
        self._forward: _Follow
        self._backward: _Follow
        self._constant: list[int] = []  # results without gradients
        self._came: list[bool] = []  # gradients of results that came when the backward was written
        self._cast_back: Any = None
        self._held: list[Tensor] = []  # what both read and no call makes

    @property
    def open(self) -> bool:
        """Whether a call may be written down: none has been, or its graph is gone without a backward."""
        return not self.ready and self.refused is None and self._recorder() is None

    def write(self, function: Callable[..., Any], tensors: Sequence[Tensor], record: bool) -> Any:
        """Call it and write down what it does; with `record` its backward, too, when that comes."""
        if record:
            made = _Writing.apply(self, function, *tensors)
        else:
            recorder = Recorder(tensors)
            made, places = self._written(function, tensors, recorder)
            self._finish(recorder, len(tensors), places)
        return self._structure(*made)

    def follow(self, function: Callable[..., Any], tensors: Sequence[Tensor], record: bool) -> Any:
        made = _following(self, function, *tensors) if record else self._run(self._forward, list(tensors))
        return self._structure(*made)

    def _run(self, function: _Follow, tensors: list[Tensor]) -> Any:
        """Below autograd and autocast, where the line was written, and on the device whose kernels it launches."""
        if self._held and self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            _captured.update({id(x): x for x in self._held})
        with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_OUTSIDE):
            if self.device.type != "cuda" or torch.cuda.current_device() == self.device.index:
                return function(tensors)
            with torch.cuda.device(self.device):
                return function(tensors)

    def _written(self, function: Callable[..., Any], given: Sequence[Tensor], recorder: Recorder) -> Any:
        """The tensors of the results and their places."""
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a weight that was cast before comes from elsewhere
        try:
            with recorder:
                made = function(*given)
        finally:
            torch.set_autocast_cache_enabled(cached)
        every = list(_tensors(made))
        found = {id(x): x for x in every}  # a result may stand in two places
        order = list(found)
        self._structure = _structure(made, iter([order.index(id(x)) for x in every]))
        places = tuple(recorder.whole(recorder.place(x)) for x in found.values())
        if any(place.root in recorder.given and place != recorder.roots[place.root] for place in places):
            recorder.refuse("a result is a view of what was given")
        return list(found.values()), tuple(_Again(x) if x in places[:i] else x for i, x in enumerate(places))

    def _finish(self, recorder: Recorder, given: int, outputs: tuple[_Place, ...], *backward: Any) -> None:
        self.refused = recorder.refused
        if self.refused is not None:
            return
        roots = recorder.roots
        fixed = _fixed(recorder, (outputs, *backward[2:]), self.device)
        self._held = [x for x in fixed.values() if x is not None]
        if not backward:
            self._forward = _function(range(given), recorder.steps, outputs, roots, self.device, fixed)
        else:
            done, came, results = backward  # steps of the forward; gradients that come, and those that leave
            forward, later = recorder.steps[:done], recorder.steps[done:]
            own = {root for step in forward for root in step.made if root is not None}
            read = {place.root for step in later for place in _placed((step.args, step.kwargs))}
            kept = sorted(own & (read | {place.root for place in _placed(results)}) - fixed.keys())
            whole = tuple(roots[root] for root in kept)
            self._forward = _function(range(given), forward, (outputs, whole), roots, self.device, fixed)
            self._backward = _function([*range(given), *kept, *came], later, results, roots, self.device, fixed)
        self.ready = True

    def again(self, ctx: Any, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Any:
        """Gradients by autograd, from a forward of their own; where a graph of them is asked for, with one."""
        graph = torch.is_grad_enabled()
        with torch.enable_grad(), torch.autocast(self.device.type, self.cast, enabled=self.cast is not None):
            given = [x.view_as(x) for x in tensors] if graph else _leaves(tensors)
            made = dict.fromkeys(_tensors(ctx.function(*given)))
        return _gradients(list(made), given, grads, graph)


class _Writing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, line: Line, function: Callable[..., Any], *tensors: Tensor) -> Any:
        given = _leaves(tensors)
        recorder = Recorder(given)
        with torch.enable_grad():
            made, places = line._written(function, given, recorder)
        line._constant = [i for i, x in enumerate(made) if not x.requires_grad]
        line.refused, line._recorder = recorder.refused, ref(recorder)
        ctx.line, ctx.function, ctx.recorder, ctx.given, ctx.made = line, function, recorder, given, made
        ctx.places, ctx.done = places, len(recorder.steps)
        ctx.save_for_backward(*tensors)  # to which nobody may write before the backward
        outputs = line._run(lambda made: tuple(map(Tensor.detach, made)), made)
        ctx.mark_non_differentiable(*[outputs[i] for i in line._constant])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        line, recorder, given, tensors = ctx.line, ctx.recorder, ctx.given, ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, None, *line.again(ctx, tensors, grads)
        if line.ready or line.refused is not None:
            return None, None, *_gradients(ctx.made, given, grads)
        whole = [_whole(x) for x in grads]
        roots = recorder.give([x for x in whole if x is not None])
        with recorder:
            results = _gradients(ctx.made, given, whole)
        places = tuple(None if x is None else recorder.place(x) for x in results)
        came = {recorder.roots[root] for root in roots}  # one may be handed on as it came, as autograd does
        if _overlap([p for p in places if p]) or any(p.root in recorder.given and p not in came for p in places if p):
            recorder.refuse("gradients share memory")
        line._came, line._cast_back = [x is not None for x in grads], cast(line.device)
        line._finish(recorder, len(given), ctx.places, ctx.done, roots, places)
        return None, None, *results


class _Following(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, line: Line, function: Callable[..., Any], *tensors: Tensor) -> Any:
        outputs, kept = line._run(line._forward, list(tensors))
        ctx.line, ctx.function, ctx.many = line, function, len(tensors)
        ctx.save_for_backward(*tensors, *kept)
        ctx.mark_non_differentiable(*[outputs[i] for i in line._constant])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        line, saved = ctx.line, list(ctx.saved_tensors)
        came = [x is not None for x in grads] == line._came and cast(line.device) == line._cast_back
        if torch.is_grad_enabled() or not came:
            return None, None, *line.again(ctx, saved[: ctx.many], grads)
        ctx.maybe_clear_saved_tensors()  # then the line alone holds them, and lets go of each when it has been read
        saved += [_whole(x) for x in grads if x is not None]
        return None, None, *line._run(line._backward, saved)


# not by way of its class, which looks for tensors that a transform of torch.func has left behind
_following = super(torch.autograd.Function, _Following).apply


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().requires_grad_(x.requires_grad) for x in tensors]


def _gradients(
    made: Sequence[Tensor], given: Sequence[Tensor], grads: Sequence[Tensor | None], graph: bool = False
) -> list[Tensor | None]:
    """Of every tensor given, None where it has none."""
    pairs = [(y, dy) for y, dy in zip(made, grads, strict=True) if dy is not None]
    wanted = [x for x in given if x.requires_grad]
    if not pairs:
        return [None] * len(given)
    ys, dys = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(ys, wanted, dys, retain_graph=True, create_graph=graph, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in given]


def _whole(x: Tensor | None) -> Any:
    """Contiguous, and where bulk copies may begin."""
    if x is None:
        return None
    x = x.contiguous()
    return x.clone() if x.data_ptr() & 15 else x


def _overlap(places: Sequence[_Place]) -> bool:
    """Whether two have an entry in common; views of one tensor may lie between each other."""
    many: dict[int, list[_Place]] = {}
    for p in places:
        many.setdefault(p.root, []).append(p)
    return any(len(views) > 1 and _shared(views) for views in many.values())


def _shared(views: Sequence[_Place]) -> bool:
    views = [p for p in views if 0 not in p.size]
    held = torch.zeros(max([p.offset + _span(p) for p in views], default=0), dtype=torch.bool, device="cpu")
    for p in views:
        size = [n if stride else 1 for n, stride in zip(p.size, p.stride, strict=True)]
        own = held.as_strided(size, p.stride, p.offset)
        if own.any():
            return True
        own.fill_(True)
    return False


def _steps(p: _Place) -> tuple[Any, ...]:
    return p.size, p.offset, [stride for n, stride in zip(p.size, p.stride, strict=True) if n > 1]


def _span(p: _Place) -> int:
    return 1 + sum((n - 1) * stride for n, stride in zip(p.size, p.stride, strict=True))


def cast(device: torch.device) -> Any:
    """The dtype of autocast, None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _structure(made: Any, index: Iterator[int]) -> Callable[..., Any]:
    """A function of a result's tensors that puts them together as in it. index: of each in turn."""
    known: dict[str, Any] = {}

    def text(x: Any) -> str:
        if isinstance(x, Tensor):
            return f"tensors[{next(index)}]"
        if isinstance(x, tuple | list):
            inside = "".join(f"{text(y)}, " for y in x)
            if hasattr(x, "_fields"):
                return f"{constant(type(x))}({inside})"
            return f"({inside})" if isinstance(x, tuple) else f"[{inside}]"
        if isinstance(x, dict):
            return "{" + "".join(f"{name!r}: {text(y)}, " for name, y in x.items()) + "}"
        return constant(x)

    def constant(x: Any) -> str:
        known[name := f"c{len(known)}"] = x
        return name

    body = text(made)
    exec(f"def structure(*tensors):\n    return {body}", known)
    found: Callable[..., Any] = known["structure"]
    return found
