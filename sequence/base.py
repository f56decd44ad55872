"""The sequence axis: a layer steps its tuple at every token, then reads the query.

forward(x, state) and step(x_t, state) agree; the state is a plain nested tuple of tensors. Which route computes a
sequence is `axes.routes.dispatch`'s decision: no layer names one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, NamedTuple, Never, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from axes.core.execution import several
from axes.core.memory import MLP, LayerNormMatrix, Leaves
from axes.core.rates import Signal
from axes.core.state_update import Output, State, StateUpdate
from axes.errors import IllegalUpdate, ShapeError, unexpected, wrong_type
from axes.kernels.common import versions
from axes.kernels.common.repeated import Same, repeated
from axes.routes import dispatch, kernel_terms, recurrent
from axes.routes import frame as frames
from axes.routes.choice import Plan, Target, require_implementation
from axes.routes.finite import is_finite, log_gates, require_finite
from axes.routes.given import Place, asked, look, require_bounds, require_state
from axes.routes.packed import Packing
from axes.routes.parameters import some_parameter
from axes.routes.precision import autocast
from axes.routes.select import plans, settle
from axes.sequence import fused
from axes.sequence.blocks import Block, Standard, queries_of
from axes.sequence.charts import Sizes


class LayerState(NamedTuple):
    """What a layer carries between tokens: convolution tails and the update's own state."""

    tails: tuple[Tensor, ...]
    memory: State

    def to(self, dtype: torch.dtype) -> LayerState:
        """The same with its memory held in this dtype. One of 16 bits halves what a token of decoding reads and writes,
        and rounds the memory at every step; a list of keys and values has the dtype of its layer."""
        return LayerState(self.tails, self.memory.to(dtype))

    def detach(self) -> LayerState:
        """The same without the graph that made it: a segment of a long sequence that begins here learns by itself."""
        return LayerState(tuple(tail.detach() for tail in self.tails), self.memory.detach())


torch.serialization.add_safe_globals([LayerState])  # a saved state loads with weights_only=True


class Across(Protocol):
    """Who knows the tokens of a sequence that other processes hold: `axes.parallel`.

    repeats: whether a call like one before asks for the same exchanges again, and reads nothing on the host.
    """

    repeats: bool

    def tails(self, layer: SequenceLayer, x: Tensor, first: tuple[Tensor, ...] | None) -> tuple[Tensor, ...] | None:
        """What the tokens before these leave in the convolutions. first: before all tokens."""

    def columns(
        self, p: Tensor, places: Sequence[tuple[int, int, int]], first: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """The same for a block whose convolutions read columns of a product p (B, T, W): p, and of every place (last
        tokens, first column, columns) what the tokens before have there. first: before all tokens, or nothing."""

    def recur(
        self, run: Callable[[Signal, State], tuple[Tensor, State]], signal: Signal, start: State
    ) -> tuple[Tensor, State]:
        """The outputs at these tokens, of a recurrence that begins before all tokens at `start`."""

    def after(self, y: Tensor, tails: tuple[Tensor, ...], memory: State) -> tuple[Tensor, LayerState | None]:
        """The layer's output, and the state after all tokens if it is wanted."""


class SequenceLayer(nn.Module):
    """A sequence-mixing layer (B, T, D) -> (B, T, D) from a tuple and the block around it.

    Subclasses are final and declare `update`, `block`, their citation and, where a paper has its own, `widths`.

    Args:
        d_model: model width D.
        heads: number of heads H, each with a query, a key and a memory; fewer memories where `queries` of the block
            read a list together, more with `num_v_heads`.
        num_v_heads: number of heads of values, a multiple of `heads`, each with a memory and rates of its own; as many
            neighbours as there are to a head share its query and key. By default as many as `heads`.
        d_k, d_v: key and value width of a head; by default what `widths` says, usually d_model / heads.
        block: another block than the class's own (a `dataclasses.replace` of it, say).
        update: another tuple than the class's own.
        implementation: reference, torch, triton or c by name; otherwise what `axes.routes.dispatch.select` picks.
        checkpoint: recompute the layer in the backward pass instead of storing its activations.
        check_finite: read x, the signal and the output at every call: NotFiniteError names the first token that is not
            finite, its sequence and head. It waits for the device, and no compiler follows it.
        device, dtype: of the parameters.

    Raises: ShapeError for inputs of the wrong shape, dtype or device; IllegalUpdate for a tuple without keys.
    """

    hidden_matrices: ClassVar[dict[str, str]] = {}  # for optimizers: what is no nn.Linear here is no hidden matrix
    across: Across | None = None  # where other processes hold tokens of the same sequence

    update: StateUpdate
    block: Block
    name: ClassVar[str]
    paper: ClassVar[str]
    equation: ClassVar[str]
    differs: ClassVar[str]
    bibtex: ClassVar[str]

    def __init__(
        self,
        d_model: int,
        heads: int = 4,
        d_k: int | None = None,
        d_v: int | None = None,
        *,
        num_v_heads: int | None = None,
        block: Block | None = None,
        update: StateUpdate | None = None,
        implementation: dispatch.Implementation | None = None,
        checkpoint: bool = False,
        check_finite: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **others: Never,
    ) -> None:
        super().__init__()
        self.update = update if update is not None else type(self).update
        block, who = block if block is not None else type(self).block, type(self).__name__
        if others:  # Python's own sentence would name this class, and nothing that there is
            *known, _ = inspect.signature(SequenceLayer).parameters
            raise unexpected(who, next(iter(others)), known)
        given = {"d_model": d_model, "heads": heads, "d_k": d_k, "d_v": d_v, "num_v_heads": num_v_heads}
        for name, size in given.items():
            if size is None:
                continue
            if not isinstance(size, int):
                raise wrong_type(who, name, "an integer", size)
            if size < 1:
                raise ShapeError(f"{who}: {name} must be at least 1, got {size}")
        if d_model % heads and (d_k is None or d_v is None):
            raise ShapeError(f"{who}: d_model={d_model} is not a multiple of heads={heads}; give d_k and d_v")
        usual_k, usual_v = self.widths(d_model, heads)
        memory = self.update.parts().memory
        values = heads if num_v_heads is None else num_v_heads
        if values != heads:
            self._check_groups(heads, values, block, memory.kind)
        d_k, d_v = usual_k if d_k is None else d_k, usual_v if d_v is None else d_v
        if min(d_k, d_v) < 1:
            sizes = f"keys of width {d_k} and values of width {d_v}"
            raise ShapeError(f"{who}: d_model={d_model} leaves heads={heads} {sizes}: give d_k and d_v, or fewer heads")
        parts = self.update.parts()
        own = (parts.monoid.loose, parts.step.writes, several(parts), parts.step.reads)
        self.sizes = Sizes(d_model, values, d_k, d_v, values // heads, *own)
        if linear := sorted(parts.linear_gates()):
            raise IllegalUpdate(f"{who}: tokens chart gates as logs: declare {linear} unit, as Scalar('name') does")
        if parts.step.writes > 1 and not block.several:
            raise IllegalUpdate(f"{who}: its block {type(block).__name__} makes one pair of key and value a token")
        if parts.step.reads > 1 and not block.asks_several:
            raise IllegalUpdate(f"{who}: its block {type(block).__name__} asks by one query a token and head")
        if not memory.keyed:
            raise IllegalUpdate(f"{who}: a sequence layer needs keys; {self.update!r} takes a given gradient")
        if isinstance(memory, MLP | LayerNormMatrix) and self.sizes.d_k != self.sizes.d_v:
            raise ShapeError(f"{who}: a residual memory needs d_k = d_v, got {self.sizes.d_k} and {self.sizes.d_v}")
        queries = queries_of(block, heads)
        if queries < 1 or heads % queries:
            raise ShapeError(f"{who}: heads={heads} are no groups of queries={queries}")
        if queries > 1 and memory.kind != "list":
            raise IllegalUpdate(
                f"{who}: several heads of queries read one list; {self.update!r} keeps none: queries=1, and "
                "Step(reads=n) for several queries of another memory"
            )
        self.memories = (values,) if queries == 1 else (heads // queries, 1)  # batch dimensions of a sequence's memory
        self.implementation, self.checkpoint, self.check_finite = implementation, checkpoint, check_finite
        require_implementation(implementation)
        settle(self.update, (d_v, d_k), implementation)
        if (reason := parts.monoid.no_height(d_v)) is not None:
            raise ShapeError(f"{who}: {reason}")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.around = block.build(self.sizes, self.update.demands(), self.update.signals(), factory)
        if (reason := parts.monoid.no_width(d_k)) is not None:
            raise ShapeError(f"{who}: {reason}")
        self.around.fused = self.around.kernels(frames.frame(self.update))
        self._tails = self._empty_tails()
        spread = getattr(block, "initial", None)
        self.initial: nn.ParameterList | None = None
        self._spread = spread
        if spread is not None and self._levels:
            raise IllegalUpdate(
                f"{who}: the block learns a first memory (initial={spread!r}), and levels begin with none, their "
                "places being counted from the first token: leave initial at None"
            )
        if spread is not None:
            self.initial = nn.ParameterList(nn.Parameter(torch.empty(x.shape, **factory)) for x in self._empty_memory())
            self._reset_initial()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy's tuple has none of its facts yet."""
        super().__setstate__(state)
        settle(self.update, (self.sizes.d_v, self.sizes.d_k), self.implementation)
        self._tails = self._empty_tails()

    @classmethod
    def widths(cls, d_model: int, heads: int) -> tuple[int, int]:
        """The usual d_k and d_v of a head."""
        return d_model // heads, d_model // heads

    def _empty_tails(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of one sequence's convolution tails."""
        return tuple(x.shape[1:] for x in self.around.tails(1, torch.empty(0, device="meta")))

    def _empty_memory(self) -> Leaves:
        """The memory's own empty leaves, per head."""
        s = self.sizes
        signal = {"k": torch.zeros(*self.memories, s.d_k), "v": torch.zeros(*self.memories, s.d_v)}
        return self.update.parts().memory.zeros(signal)

    def _reset_initial(self) -> None:
        if self.initial is not None and self._spread is not None:
            with torch.no_grad():
                for p, empty in zip(self.initial, self._empty_memory(), strict=True):
                    p.copy_(empty + self._spread * torch.randn(empty.shape))

    def reset_parameters(self) -> None:
        """Initialise every parameter again."""
        for module in reversed(list(self.around.modules())):  # a parent's choices overrule its children's defaults
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
        self._reset_initial()

    def extra_repr(self) -> str:
        s = self.sizes
        values = "" if s.group == 1 else f", num_v_heads={s.heads}"
        return f"d_model={s.d_model}, heads={s.key_heads}{values}, d_k={s.d_k}, d_v={s.d_v}, update={self.update!r}"

    # ---- what runs -------------------------------------------------------------------------------------------

    @classmethod
    def default_plans(
        cls, target: Target | None, dtype: torch.dtype | None, implementation: dispatch.Implementation | None
    ) -> tuple[Plan, ...]:
        """What runs for the tuple that the class declares, by default on a CPU in float32."""
        named = implementation or dispatch.chosen()
        if (cell := cls.block.cell) is not None:
            return recurrent.plans(cls.update, cell, target or Target.of("cpu"), dtype or torch.float32, named)
        return plans(cls.update, target or Target.of("cpu"), dtype or torch.float32, named)

    def plans(
        self,
        target: Target | None = None,
        dtype: torch.dtype | None = None,
        implementation: dispatch.Implementation | None = None,
    ) -> tuple[Plan, ...]:
        """What runs for a sequence and for one token, by default where the layer is and in its dtype."""
        parameter, s = next(self.parameters()), self.sizes
        named = implementation or self.implementation or dispatch.chosen()
        if (cell := self.around.cell) is not None:
            place, dtype = target or Target.of(parameter.device), dtype or parameter.dtype
            return recurrent.plans(self.update, cell, place, dtype, named, max(s.d_k, s.d_v))
        keys, each = self.memories if s.group == 1 else (s.key_heads,), () if s.writes == 1 else (s.writes,)
        shapes = {"k": (1, 1, *keys, *each, s.d_k), "v": (1, 1, *self.memories, *each, s.d_v)}
        return plans(self.update, target or Target.of(parameter.device), dtype or parameter.dtype, named, shapes)

    # ---- running ---------------------------------------------------------------------------------------------

    def init_state(
        self, batch: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> LayerState:
        """The state before the first token of `batch` sequences, for inputs of this device and dtype."""
        parameter = next(self.parameters())
        device = parameter.device if device is None else device
        like = torch.empty(0, device=device, dtype=parameter.dtype if dtype is None else dtype)
        return LayerState(self.around.tails(batch, like), self._init_memory(batch, like))

    def _init_memory(self, batch: int, like: Tensor) -> State:
        s, wide = self.sizes, torch.promote_types(like.dtype, torch.float32)
        zero = torch.zeros((), device=like.device, dtype=wide)
        each = () if s.writes == 1 else (s.writes,)
        zeros = {name: zero.expand(batch, *self.memories, *each, n) for name, n in (("k", s.d_k), ("v", s.d_v))}
        weights = None
        if self.initial is not None:
            weights = tuple(p.to(wide).expand(batch, *p.shape) for p in self.initial)
        return self.update.init(zeros, weights)

    def forward(
        self,
        x: Tensor,
        state: LayerState | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, LayerState | None]:
        """A whole sequence.

        x: (B, T, D).  state: of earlier tokens.  mask: (B, T), true (1) at real tokens; padding is skipped wherever it
        stands, its outputs are zero.  cu_seqlens: integer boundaries (N + 1,) of N sequences packed into B = 1, which
        have one state each; on a GPU their values are not read, so not checked.  Returns y (B, T, D) and the state
        after the last token; None only where other processes hold tokens too, and it is not asked for (`across`).
        """
        self._check(x, 3)
        if mask is not None and cu_seqlens is not None:
            raise ShapeError(f"{type(self).__name__}: give mask or cu_seqlens, not both")
        if self.across is not None and (mask is not None or cu_seqlens is not None):
            raise ShapeError(
                f"{type(self).__name__}: sequences split over processes have one length: leave mask and cu_seqlens out"
            )
        if mask is not None:
            self._check_mask(mask, x)
            mask = mask.bool()  # tokenizers give 0 and 1
            lengths = mask.sum(1)
            cu_seqlens = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
            real, state = self._through(x[mask][None], state, cu_seqlens)
            return real.new_zeros(x.shape).masked_scatter(mask[..., None], real), state
        if cu_seqlens is not None:
            require_bounds(type(self).__name__, cu_seqlens, "x", x.shape, x.device)
            cu_seqlens = cu_seqlens.to(torch.int32)
        return self._through(x, state, cu_seqlens)

    def step(self, x: Tensor, state: LayerState | None = None) -> tuple[Tensor, LayerState]:
        """One token: x (B, D) -> y (B, D), by the recurrence itself; memory independent of how many came before
        (a list memory excepted)."""
        self._check(x, 2)
        if state is None:
            state = self.init_state(x.shape[0], x.device, x.dtype)
        self._check_state(state, x.shape[0], x)
        if self.around.cell is not None:
            y, state = self._run(x[:, None], state, None)
            assert state is not None
            return y[:, 0], state
        signal, tails, kept = fused.enter(self.around, x[:, None], state.tails, None, self.implementation, token=True)
        self._look(x[:, None], signal)
        out, memory = dispatch.one_token(self.update, signal, state.memory, self.implementation)
        y = fused.leave(self.around, out, kept)
        self._look_back(y, out)
        return y[:, 0], LayerState(tails, memory)

    def recall(self, x: Tensor, state: LayerState | None = None) -> tuple[Tensor, LayerState]:
        """What the queries of tokens x (B, T, D) read of the memory as it stands: nothing is written.

        Convolutions see the tokens before, as of `forward`, and the state comes back with these tokens in their tails.
        """
        self._check(x, 3)
        if state is None:
            state = self.init_state(x.shape[0], x.device, x.dtype)
        self._check_state(state, x.shape[0], x)
        signal, tails, kept = self.around.enter(x, state.tails)
        q, held = signal["q"], state.memory
        wide = torch.promote_types(x.dtype, torch.float32)
        given = {n: y.to(wide) for n, y in signal.items()}
        out = self.update.output(held, {n: y[:, 0] for n, y in given.items()})
        weights, norm = (tuple(leaf.unsqueeze(1) for leaf in leaves) for leaves in out)
        read = self.update.read(Output(weights, norm), given["q"], given)
        return self.around.leave(read.to(q.dtype), kept), LayerState(tails, held)

    def _through(
        self, x: Tensor, state: LayerState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, LayerState | None]:
        """Sequences side by side, or one after another with a state each."""
        if state is not None:
            self._check_state(state, x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, x)
        if self.checkpoint and torch.is_grad_enabled():
            y, state = checkpoint(self._run, x, state, cu_seqlens, use_reentrant=False)
            return y, state
        if state is None and cu_seqlens is None and self._repeats(x):
            named = self.implementation or dispatch.chosen()
            facts = named, Same(self.update), Same(self.across)
            made: tuple[Tensor, LayerState | None] = repeated(self, _run_alone, (x,), *facts)
            return made
        return self._run(x, state, cu_seqlens)

    @property
    def _levels(self) -> bool:
        """Whether the memory has levels, which kernels compute from the first token on: none is there yet."""
        return self.update.parts().memory.kind == "levels"

    def _begins_by_kernel(self, x: Tensor) -> bool:
        """Whether kernels need no state before the first token, not even one of zeros. Compilers are shown one."""
        if torch.compiler.is_compiling():
            return False
        if self._levels:
            return True
        if self.initial is not None or versions.no_kernel(x.device, x.dtype) is not None:
            return False
        return kernel_terms.empty_by_kernel(self.update)

    def _repeats(self, x: Tensor) -> bool:
        """Whether a call like one before does the same again: where kernels run, nothing is read on the host."""
        if torch.compiler.is_compiling() or not x.numel() or self.check_finite:
            return False
        if self.around.cell is not None or self._levels or self.across is not None and not self.across.repeats:
            return False
        cls = type(self)
        own = cls._run is SequenceLayer._run and cls._recur is SequenceLayer._recur
        return own and "_recur" not in self.__dict__ and versions.no_kernel(x.device, x.dtype) is None

    def _run(self, x: Tensor, state: LayerState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, LayerState | None]:
        packing = None if cu_seqlens is None else Packing.of(cu_seqlens, x.shape[1])
        before, start = (None, None) if state is None else state
        columns = None
        if self.across is not None and fused.asks(self.around, x, self.implementation):
            columns = self.across.columns
        elif self.across is not None:
            before = self.across.tails(self, x, before)
        signal, tails, kept = fused.enter(self.around, x, before, packing, self.implementation, columns=columns)
        self._look(x, signal, cu_seqlens)

        def first() -> State:
            return start or self._init_memory(x.shape[0] if packing is None else packing.sequences, x)

        if (cell := self.around.cell) is not None:
            named, (around, carry) = self.implementation or dispatch.chosen(), self.around.carried(tails)
            out, memory, carry = recurrent.run(
                self.update, cell, signal, self.around.matrices(), carry, first(), cu_seqlens, named
            )
            tails = (*around, *carry)
            y = fused.leave(self.around, out, kept)
            self._look_back(y, out, cu_seqlens)
            return y, LayerState(tails, memory)
        frame = fused.frame_of(kept)
        if self.across is not None:
            out, memory = self.across.recur(functools.partial(self._recur_in, frame), signal, first())
            y = fused.leave(self.around, out, kept)
            self._look_back(y, out)
            return self.across.after(y, tails, memory)
        if frame is not None:
            out, memory = frames.run(frame, signal, first(), cu_seqlens, self.implementation)
        elif cu_seqlens is None:
            out, memory = self._recur(signal, None if start is None and self._begins_by_kernel(x) else first())
        else:
            named = self.implementation
            out, memory = dispatch.run_packed(self.update, signal, first(), cu_seqlens, implementation=named)
        y = fused.leave(self.around, out, kept)
        self._look_back(y, out, cu_seqlens)
        return y, LayerState(tails, memory)

    def tails_of(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the convolutions keep of tokens x (B, T, D) for those that follow; they are as many as one is wide."""
        return fused.enter(self.around, x, None, None, self.implementation)[1]

    def _recur_in(self, frame: frames.Frame | None, signal: Signal, start: State) -> tuple[Tensor, State]:
        """The recurrence of one batch of sequences, in the frame in which its queries and keys are given."""
        if frame is None:
            return self._recur(signal, start)
        out, memory = frames.run(frame, signal, start, None, self.implementation)
        return out, memory

    def _recur(self, signal: Signal, memory: State | None) -> tuple[Tensor, State]:
        """The recurrence alone. memory: None where kernels begin with an empty one by themselves."""
        return dispatch.run(self.update, signal, memory, time=1, implementation=self.implementation)

    # ---- checks ------------------------------------------------------------------------------------------------

    def _look(self, x: Tensor, signal: Signal, cu_seqlens: Tensor | None = None) -> None:
        if self.check_finite:
            who, gates = type(self).__name__, log_gates(self.update)
            require_finite(who, {"x": x}, cu_seqlens=cu_seqlens)
            require_finite(who, signal, gates=gates, batch=2, cu_seqlens=cu_seqlens)

    def _look_back(self, y: Tensor, out: Tensor, cu_seqlens: Tensor | None = None) -> None:
        """At the output (B, T, D), and where it is not finite at what was read (B, T, H, d_v), which has heads."""
        if self.check_finite and not is_finite(y):
            who = type(self).__name__
            require_finite(who, {"what is read": out}, batch=2, cu_seqlens=cu_seqlens)
            require_finite(who, {"the output": y}, cu_seqlens=cu_seqlens)

    def _check_groups(self, heads: int, values: int, block: Block, memory: str) -> None:
        who = type(self).__name__
        if memory == "list":
            raise ShapeError(f"{who}: num_v_heads={values} shares keys among values; a list stores them in pairs")
        if self.update.parts().step.writes > 1 or self.update.parts().step.reads > 1:
            raise ShapeError(
                f"{who}: num_v_heads={values} shares keys among values; several writes or reads have some of their own"
            )
        if block.grouped is not None:
            raise ShapeError(f"{who}: num_v_heads={values}, but its block {type(block).__name__} {block.grouped}")
        if values % heads:
            raise ShapeError(f"{who}: num_v_heads={values} is not a multiple of heads={heads}, whose keys are shared")

    def _check(self, x: Tensor, ndim: int) -> None:
        who, shape = type(self).__name__, "(B, T, D)" if ndim == 3 else "(B, D)"
        if not isinstance(x, Tensor):
            raise wrong_type(who, "x", f"a tensor {shape} with D = {self.sizes.d_model}", x)
        if x.ndim != ndim or x.shape[-1] != self.sizes.d_model:
            raise ShapeError(f"{who}: x must be {shape} with D = {self.sizes.d_model}, got {tuple(x.shape)}")
        parameter = some_parameter(self._modules["around"])  # type: ignore[arg-type]  # an attribute takes longer
        assert parameter is not None
        if x.device != parameter.device:
            raise ShapeError(f"{who}: x is on {x.device}, the layer on {parameter.device}: move one of them")
        if x.dtype != parameter.dtype and not (autocast(x) and x.is_floating_point()):
            raise ShapeError(f"{who}: x is {x.dtype}, the layer {parameter.dtype}: convert one, or use autocast")

    def _check_mask(self, mask: Tensor, x: Tensor) -> None:
        who = type(self).__name__
        if not isinstance(mask, Tensor):
            raise wrong_type(who, "mask", "a tensor (B, T), true (1) at real tokens", mask)
        if mask.is_floating_point() or mask.is_complex():
            raise ShapeError(f"{who}: mask must be true (1) at real tokens, got {mask.dtype}: give mask.bool()")
        if mask.shape != x.shape[:2]:
            raise ShapeError(f"{who}: mask must be (B, T) = {tuple(x.shape[:2])}, got {tuple(mask.shape)}")
        if mask.device != x.device:
            raise ShapeError(f"{who}: mask is on {mask.device}, x on {x.device}: move one of them")

    def _check_state(self, state: LayerState, batch: int, x: Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        who, s, known = type(self).__name__, self.sizes, asked(self.update)
        if not isinstance(state, LayerState):
            raise wrong_type(who, "state", "a LayerState, as init_state or an earlier call returned it", state)
        found: list[Hashable] = [batch, self.memories, s, x.dtype, x.device, self._tails]
        seen = look(state.tails, found) and look(state.memory, found)
        if seen and (found == known.last or known.seen(found)):
            return
        place = Place((batch, *self.memories), s.d_k, s.d_v, x.dtype, x.device)
        require_state(who, self.update, state.memory, place)
        if not isinstance(state.tails, tuple) or len(state.tails) != len(self._tails):
            raise ShapeError(f"{who}: state.tails must be a tuple of {len(self._tails)}: is it another layer's state?")
        for i, (tail, size) in enumerate(zip(state.tails, self._tails, strict=True)):
            if not isinstance(tail, Tensor):
                raise wrong_type(who, f"state.tails[{i}]", "a tensor", tail)
            if tail.shape != (batch, *size) or tail.device != x.device or not tail.is_floating_point():
                got = f"{tail.dtype} {tuple(tail.shape)} on {tail.device}"
                raise ShapeError(f"{who}: state.tails[{i}] must be {(batch, *size)} on {x.device}, got {got}")
        if seen:
            known.keep(found)


def _run_alone(layer: SequenceLayer, x: Tensor, named: str | None, update: Same, across: Same) -> Any:
    """Facts of the call: what names an implementation, the layer's tuple, and who holds other tokens."""
    return layer._run(x, None, None)


def layer(update: StateUpdate, name: str = "Custom", block: Block | None = None) -> type[SequenceLayer]:
    """A layer class for any legal keyed tuple: axes.sequence.layer(update)(d_model, heads=...).

    block: what surrounds the recurrence; by default projections, normalised keys and default charts for every rate.
    """
    return _declare(update, name, block)


@functools.cache  # the same declaration is the same class, also for an object that was unpickled
def _declare(update: StateUpdate, name: str, block: Block | None) -> type[SequenceLayer]:
    _, h, _, _, memory = update.parts()
    default = Standard(initial=None if h.is_identity else 0.5)
    if memory.kind == "list":
        default = Standard(conv=0, activation=None, key_norm=False, output_norm=False, output_gate=None)

    def reduce(self: SequenceLayer) -> tuple[Any, ...]:
        return _undeclared, (update, name, block), self.__dict__

    declared = {"update": update, "block": block or default, "__doc__": f"A layer of {update!r}.", "__reduce__": reduce}
    return type(name, (SequenceLayer,), declared)


def _undeclared(update: StateUpdate, name: str, block: Block | None) -> SequenceLayer:
    """An object of a class that no module holds, before its attributes are put back."""
    cls = _declare(update, name, block)
    return cls.__new__(cls)
