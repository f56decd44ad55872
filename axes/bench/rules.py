"""The rules that are compared: one tuple each, its inputs, and the peers that compute the same recurrence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, sigmoid

from axes.bench.floors import Account, account
from axes.core import reference
from axes.core.algorithms import Step
from axes.core.costs import Alignment, SquaredError
from axes.core.derived import block_size
from axes.core.monoids import Diagonal, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.routes import dispatch
from axes.sequence import (
    RWKV7,
    AdamNet,
    FrankWolfeDelta,
    LatticeDec,
    LatticeOSR,
    Longhorn,
    MemoraMatrix,
    MonetaMatrix,
    TitansMatrix,
    TTTLinear,
    YaadMatrix,
)

Signal = dict[str, Tensor]
Run = Callable[[Signal], tuple[Tensor, Tensor]]  # output (B, T, H, V) and final state
_BETA = Per("beta")


@final
@dataclass(frozen=True)
class Shape:
    """Batch, tokens, heads, width of keys and values."""

    batch: int
    tokens: int
    heads: int
    width: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From "B,T,H,D"."""
        try:
            shape = cls(*(int(part) for part in text.split(",")))
        except (ValueError, TypeError):
            raise AxesError(f"a shape is four numbers B,T,H,D, as 8,4096,16,128, not {text!r}") from None
        if min(shape.batch, shape.tokens, shape.heads, shape.width) < 1:
            raise AxesError(f"every number of a shape is at least 1, got {text!r}")
        return shape

    def __str__(self) -> str:
        return f"{self.batch},{self.tokens},{self.heads},{self.width}"


@final
@dataclass(frozen=True)
class SequenceRule:
    """One recurrence to be compared.

    needs: what a token supplies beyond q, k, v, name -> kind (strength, gate, slow gate, channels, (small) rows, key).
    fla: how flash-linear-attention is called, or None where it has no kernel.
    """

    name: str
    update: StateUpdate
    needs: Mapping[str, str]
    fla: Callable[..., tuple[Tensor, Tensor]] | None = None
    erases: bool = False

    def signal(self, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Signal:
        """Random inputs: unit keys, strengths in (0, 1), gates mostly open."""
        generator = torch.Generator(device).manual_seed(seed)
        lead, wide = (shape.batch, shape.tokens, shape.heads), (shape.batch, shape.tokens, shape.heads, shape.width)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=device)

        signal = {n: normalize(draw(*wide), dim=-1).to(dtype) for n in "qk"}
        signal["v"] = draw(*wide).to(dtype)
        for name, kind in self.needs.items():
            if kind == "strength":
                signal[name] = sigmoid(draw(*lead))
            elif kind == "gate":
                signal[name] = logsigmoid(3 + draw(*lead))
            elif kind == "retention":
                heads = torch.arange(shape.heads, device=device, dtype=torch.float32)
                signal[name] = torch.log1p(-torch.exp2(-5 - heads)).expand(lead).contiguous()
            elif kind == "channels":
                signal[name] = logsigmoid(3 + draw(*wide))
            elif kind in ("rows", "small rows"):  # small for costs that grow faster than squares
                signal[name] = sigmoid(draw(*wide)) * (1.0 if kind == "rows" else 0.02)
            elif kind == "key":
                signal[name] = (normalize(draw(*wide), dim=-1) * 0.5).to(dtype)
        if "a" in signal and "b" in signal:  # RWKV-7: what is removed is read along the same direction
            signal["b"] = (-signal["a"] * sigmoid(draw(*lead, 1))).to(dtype)
        return signal

    def account(self, shape: Shape, dtype: torch.dtype) -> Account:
        kinds = list(self.needs.values())
        return account(
            shape.batch * shape.tokens,
            shape.heads,
            shape.width,
            dtype.itemsize,
            numbers=sum(k in ("strength", "gate") for k in kinds),
            channels=shape.width * sum(k in ("channels", "rows", "small rows") for k in kinds),
            keys=kinds.count("key"),
            erases=self.erases,
            slots=block_size(self.update),
        )

    def ours(self, implementation: dispatch.Implementation) -> Run:
        """The tuple through `axes.routes.dispatch`, as a layer runs it."""

        def run(signal: Signal) -> tuple[Tensor, Tensor]:
            out, state = dispatch.run(self.update, signal, time=1, implementation=implementation)
            return out, state.theta[0]

        return run

    def token_loop(self) -> Run:
        """The interpreter, its inputs unbound once."""

        def run(signal: Signal) -> tuple[Tensor, Tensor]:
            out, state = reference.run(self.update, signal, time=1)
            return out, state.theta[0]

        return run


# How flash-linear-attention is called: form is "chunk" or "fused_recurrent"; its states are (B, H, K, V).


def _linear(fla: Any, form: str, s: Signal, **o: Any) -> Any:
    return getattr(fla.linear_attn, f"{form}_linear_attn")(s["q"], s["k"], s["v"], normalize=False, **o)


def _retention(fla: Any, form: str, s: Signal, **o: Any) -> Any:
    return getattr(fla.retention, f"{form}_retention")(s["q"], s["k"], s["v"], **o)


def _simple_gla(fla: Any, form: str, s: Signal, **o: Any) -> Any:
    return getattr(fla.simple_gla, f"{form}_simple_gla")(s["q"], s["k"], s["v"], g=s["decay"], **o)


def _gla(fla: Any, form: str, s: Signal, **o: Any) -> Any:
    return getattr(fla.gla, f"{form}_gla")(s["q"], s["k"], s["v"], s["decay"], **o)


def _delta(fla: Any, form: str, s: Signal, **o: Any) -> Any:
    beta = s["beta"].to(s["q"].dtype)
    return getattr(fla.delta_rule, f"{form}_delta_rule")(s["q"], s["k"], s["v"], beta, **o)


def _gated_delta(fla: Any, form: str, s: Signal, **o: Any) -> Any:
    call = getattr(fla.gated_delta_rule, f"{form}_gated_delta_rule")
    return call(s["q"], s["k"], s["v"], g=s["decay"], beta=s["beta"], **o)


def _kda(fla: Any, form: str, s: Signal, **o: Any) -> Any:
    return getattr(fla.kda, f"{form}_kda")(s["q"], s["k"], s["v"], g=s["decay"], beta=s["beta"], **o)


def _dplr(fla: Any, form: str, s: Signal, **o: Any) -> Any:
    call = getattr(fla.generalized_delta_rule, f"{form}_dplr_delta_rule")
    return call(s["q"], s["k"], s["v"], s["a"], s["b"], s["decay"], **o)


_GATED = Scalar("decay")
RULES: tuple[SequenceRule, ...] = (
    SequenceRule("linear attention", StateUpdate(Alignment()), {}, _linear),
    SequenceRule("retention", StateUpdate(Alignment(), monoid=_GATED), {"decay": "retention"}, _retention),
    SequenceRule("scalar gate", StateUpdate(Alignment(), monoid=_GATED), {"decay": "gate"}, _simple_gla),
    SequenceRule("diagonal gate", StateUpdate(Alignment(), monoid=Diagonal("decay")), {"decay": "channels"}, _gla),
    SequenceRule(
        "delta",
        StateUpdate(SquaredError(), algorithm=Step(_BETA)),
        {"beta": "strength"},
        _delta,
        erases=True,
    ),
    SequenceRule(
        "gated delta",
        StateUpdate(SquaredError(), monoid=_GATED, algorithm=Step(_BETA, at="gated")),
        {"beta": "strength", "decay": "gate"},
        _gated_delta,
        erases=True,
    ),
    SequenceRule(
        "diagonal delta",
        StateUpdate(SquaredError(), monoid=Diagonal("decay"), algorithm=Step(_BETA, at="gated")),
        {"beta": "strength", "decay": "channels"},
        _kda,
        erases=True,
    ),
    SequenceRule("dplr", RWKV7.update, {"decay": "channels", "a": "key", "b": "key"}, _dplr, erases=True),
    SequenceRule(
        "momentum delta",
        TitansMatrix.update,
        {"decay": "gate", "momentum": "gate", "theta": "strength"},
        None,
        erases=True,
    ),
    SequenceRule("longhorn", Longhorn.update, {"beta": "rows"}, None, erases=True),
    SequenceRule("yaad", YaadMatrix.update, {"decay": "channels", "eta": "rows", "delta": "rows"}, None, erases=True),
    SequenceRule("frank-wolfe delta", FrankWolfeDelta.update, {"decay": "gate", "beta": "strength"}, None, erases=True),
    SequenceRule("ttt-linear", TTTLinear.update, {"eta": "strength"}, None, erases=True),
    SequenceRule("moneta", MonetaMatrix.update, {"decay": "channels", "eta": "small rows"}, erases=True),
    SequenceRule("memora", MemoraMatrix.update, {"decay": "channels", "eta": "small rows"}, erases=True),
    SequenceRule("adam", AdamNet.update, {"decay": "gate", "beta": "strength"}, erases=True),
    SequenceRule("lattice decoding", LatticeDec.update, {"gamma": "strength"}, erases=True),
    SequenceRule("lattice without norms", LatticeOSR.update, {"gamma": "strength", "decay": "gate"}, erases=True),
)


def find(names: tuple[str, ...]) -> tuple[SequenceRule, ...]:
    """Rules by name; all without names."""
    known = {rule.name: rule for rule in RULES}
    for name in names:
        if name not in known:
            raise AxesError(f"unknown rule {name!r}; known: {', '.join(known)}")
    return tuple(known[name] for name in names) if names else RULES
