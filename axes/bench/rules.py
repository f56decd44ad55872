"""The rules that are compared: one tuple each, its inputs, and the peers that compute the same recurrence."""

from __future__ import annotations

import dataclasses
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
from axes.core.memory import Correlation, Fenwick, Regression
from axes.core.monoids import Diagonal, Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.routes import dispatch
from axes.sequence import (
    GSA,
    HGRN2,
    MLSTM,
    RWKV6,
    RWKV7,
    S4D,
    S5,
    TTTMLP,
    AdamNet,
    Comba,
    DeltaProduct,
    FrankWolfeDelta,
    LatticeDec,
    LatticeEnc,
    LatticeOSR,
    LatticeSim,
    LogLinearGatedDeltaNet,
    Longhorn,
    LonghornDiagonal,
    Mamba1,
    Memora,
    MemoraMatrix,
    Moneta,
    MonetaMatrix,
    MuonNet,
    MuonNetState,
    RLSNet,
    ShampooNet,
    Titans,
    TitansMatrix,
    TTTLinear,
    Yaad,
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

    needs: what a token supplies beyond q, k, v, name -> kind ((small) strength, gate, slow gate, channels, (small)
    rows, key, pairs, angles, slots, levels; spectrum and bonus are the same for all tokens).
    fla: how flash-linear-attention is called, or None where it has no kernel.
    initial: spread of the first memory around its own, as layers have it; None for its own.
    key_width: of q and k, which all heads then share, where it is not that of values; of 1 entry: they are ones.
    """

    name: str
    update: StateUpdate
    needs: Mapping[str, str]
    fla: Callable[..., tuple[Tensor, Tensor]] | None = None
    erases: bool = False
    initial: float | None = None
    key_width: int | None = None

    def signal(self, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Signal:
        """Random inputs: unit keys, strengths in (0, 1), gates mostly open."""
        generator = torch.Generator(device).manual_seed(seed)
        lead, wide = (shape.batch, shape.tokens, shape.heads), (shape.batch, shape.tokens, shape.heads, shape.width)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=device)

        def pairs(heads: tuple[int, ...], width: int) -> Tensor:  # as blocks make them, write by write
            if writes == 1:
                return draw(*heads, width)
            return draw(*heads[:2], writes, *heads[2:], width).movedim(2, 3)

        keys, writes = shape.width if self.key_width is None else self.key_width, self.update.parts().step.writes
        each = (*lead, writes) if writes > 1 else lead
        heads_of = lead if self.key_width is None else (*lead[:2], 1)
        signal = {"q": normalize(draw(*heads_of, keys), dim=-1).to(dtype)}
        signal["k"] = normalize(pairs(heads_of, keys), dim=-1).to(dtype)
        if keys == 1:
            signal |= {n: torch.ones_like(signal[n]) for n in "qk"}
        signal["v"] = pairs(lead, shape.width).to(dtype)
        for name, kind in self.needs.items():
            if kind in ("strength", "small strength"):  # small for gradients of many weights
                signal[name] = sigmoid(draw(*each)) * (1.0 if kind == "strength" else 0.02)
            elif kind in ("pairs", "slots"):
                signal[name] = logsigmoid(3 + draw(*lead, shape.width // 2 if kind == "pairs" else SLOTS))
            elif kind == "levels":
                signal[name] = 2 * sigmoid(draw(*lead, LEVELS))
            elif kind == "angles":
                signal[name] = draw(*lead, shape.width // 2)
            elif kind == "spectrum":
                signal[name] = -torch.arange(1, keys + 1, device=device).expand(1, 1, *wide[2:], keys).float()
            elif kind == "bonus":
                signal[name] = draw(1, 1, shape.heads, keys)
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
            numbers=sum(k in ("strength", "small strength", "gate") for k in kinds)
            + SLOTS * kinds.count("slots")
            + LEVELS * kinds.count("levels"),
            channels=shape.width * sum(k in ("channels", "rows", "small rows") for k in kinds)
            + shape.width // 2 * sum(k in ("pairs", "angles") for k in kinds),
            keys=kinds.count("key") + self.update.parts().step.writes - 1,
            erases=self.erases,
            slots=block_size(self.update),
            key_width=self.key_width,
            products=self.key_width is None,
        )

    def given(self, signal: Signal) -> Signal:
        """As a layer gives it: what is the same for all tokens, and keys of all heads, are expanded."""
        (b, t), h = signal["v"].shape[:2], signal["v"].shape[2]
        made = {n: x.expand(b, t, *x.shape[2:]) if x.shape[:2] == (1, 1) else x for n, x in signal.items()}
        if self.key_width is None:
            return made
        return made | {n: made[n].expand(b, t, h, -1) for n in "qk"}

    def ours(self, implementation: dispatch.Implementation | None) -> Run:
        """The tuple through `axes.routes.dispatch`, as a layer runs it; None: by what it picks."""

        def run(signal: Signal) -> tuple[Tensor, Tensor]:
            weights, given = self.weights(signal), self.given(signal)
            out, state = dispatch.run(self.update, given, time=1, weights=weights, implementation=implementation)
            return out, state.theta[0]

        return run

    def token_loop(self) -> Run:
        """The interpreter, its inputs unbound once."""

        def run(signal: Signal) -> tuple[Tensor, Tensor]:
            weights = self.weights(signal)
            out, state = reference.run(self.update, self.given(signal), time=1, weights=weights)
            return out, state.theta[0]

        return run

    def weights(self, signal: Signal) -> tuple[Tensor, ...] | None:
        """The first memory, alike in every head and sequence."""
        if self.initial is None:
            return None
        wide = torch.float64 if signal["v"].dtype == torch.float64 else torch.float32
        own = self.update.parts().memory.zeros({n: signal[n][:, 0].detach().to(wide) for n in "kv"})
        generator = torch.Generator().manual_seed(0)
        draws = (torch.randn(x.shape[-2:], generator=generator, dtype=torch.float64) for x in own)
        return tuple(x + self.initial * w.to(x) for x, w in zip(own, draws, strict=True))


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


def _prev(update: StateUpdate) -> StateUpdate:
    """The same with its gradient at the previous state."""
    n = update.normal()
    return StateUpdate(n.cost, n.h, n.monoid, dataclasses.replace(n.algorithm, at="prev"), n.memory)


def _solved(memory: Regression | Correlation) -> StateUpdate:
    return StateUpdate(Alignment(), monoid=Scalar("decay"), algorithm=Step(_BETA), memory=memory)


def _hgrn(fla: Any, form: str, s: Signal, **o: Any) -> Any:
    o.pop("scale")
    call = getattr(fla.hgrn, f"{form}_hgrn")
    out, final = call(s["v"].flatten(2), s["decay"].flatten(2), **o)
    return out.view(s["v"].shape), final


def _rwkv6(fla: Any, form: str, s: Signal, **o: Any) -> Any:
    call = getattr(fla.rwkv6, f"{form}_rwkv6")
    return call(s["q"], s["k"], s["v"], s["decay"], s["bonus"][0, 0], **o)


def _hgrn2(fla: Any, form: str, s: Signal, **o: Any) -> Any:
    key = (s["k"] * -torch.expm1(s["decay"])).to(s["k"].dtype)
    return getattr(fla.gla, f"{form}_gla")(s["q"], key, s["v"], s["decay"], **o)


def _gsa(fla: Any, form: str, s: Signal, **o: Any) -> Any:
    write = -torch.expm1(s["decay"]).to(s["q"].dtype)
    return getattr(fla.gsa, f"{form}_gsa")(s["q"], s["k"], s["v"], write, s["decay"], **o)


def _comba(fla: Any, form: str, s: Signal, **o: Any) -> Any:
    """Their erase has the write's strength, and a key of its own."""
    p = (s["k"] * (s["erase"] / s["beta"])[..., None]).to(s["k"].dtype)
    return getattr(fla.comba, f"{form}_comba")(s["q"], s["k"], p=p, v=s["v"], g=s["decay"], beta=s["beta"], **o)


def _delta_product(fla: Any, form: str, s: Signal, **o: Any) -> Any:
    """Two writes a token, one after another in time."""
    call = getattr(fla.gated_delta_product, f"{form}_gated_delta_product")
    k, v, beta = (s[n].movedim(3, 2).flatten(1, 2) for n in ("k", "v", "beta"))
    return call(s["q"], k, v, None, beta.to(k.dtype), num_householder=s["k"].shape[3], **o)


def _log_linear(fla: Any, form: str, s: Signal, **o: Any) -> Any:
    """Their levels are as many as the tokens need."""
    levels = s["level"][..., : (s["v"].shape[1] - 1).bit_length() + 1].contiguous()
    return fla.log_linear_attn.chunk_log_linear_attn(s["q"], s["k"], s["v"], s["decay"], levels, **o)


SLOTS, LEVELS = 64, 16
_GATED = Scalar("decay")
_SMALL_ROWS = {"decay": "channels", "eta": "small rows"}
_YAAD = {"decay": "channels", "eta": "rows", "delta": "rows"}
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
    SequenceRule("longhorn", Longhorn.update, {"beta": "rows"}, erases=True),
    SequenceRule("longhorn diagonal", LonghornDiagonal.update, {"beta": "rows"}, erases=True),
    SequenceRule("yaad", YaadMatrix.update, _YAAD, erases=True),
    SequenceRule("yaad prev", _prev(YaadMatrix.update), _YAAD, erases=True),
    SequenceRule("frank-wolfe delta", FrankWolfeDelta.update, {"decay": "gate", "beta": "strength"}, erases=True),
    SequenceRule("ttt-linear", TTTLinear.update, {"eta": "strength"}, erases=True),
    SequenceRule("moneta", MonetaMatrix.update, _SMALL_ROWS, erases=True),
    SequenceRule("memora", MemoraMatrix.update, _SMALL_ROWS, erases=True),
    SequenceRule(
        "log-linear",
        StateUpdate(Alignment(), monoid=_GATED, memory=Fenwick(LEVELS)),
        {"decay": "gate", "level": "levels"},
        _log_linear,
    ),
    SequenceRule(
        "log-linear gated delta",
        LogLinearGatedDeltaNet.update,
        {"decay": "gate", "beta": "strength", "level": "levels"},
        erases=True,
    ),
    SequenceRule("delta product", DeltaProduct.update, {"beta": "strength"}, _delta_product, erases=True),
    SequenceRule(
        "comba",
        Comba.update,
        {"decay": "gate", "erase": "strength", "beta": "strength"},
        _comba,
        erases=True,
    ),
    SequenceRule("rwkv6", RWKV6.update, {"decay": "channels", "bonus": "bonus"}, _rwkv6),
    SequenceRule("hgrn2", HGRN2.update, {"decay": "channels"}, _hgrn2),
    SequenceRule("mlstm", MLSTM.update, {"forget": "gate", "input": "strength"}),
    SequenceRule("s4d", S4D.update, {"decay": "pairs", "angle": "angles"}),
    SequenceRule("s5", S5.update, {"decay": "pairs", "angle": "angles"}, key_width=1),
    SequenceRule("gated slots", GSA.update, {"decay": "slots"}, _gsa),
    SequenceRule(
        "row gate",  # what HGRN and RG-LRU compute
        StateUpdate(Alignment(), monoid=Diagonal("decay", side="row")),
        {"decay": "channels"},
        _hgrn,
        key_width=1,
    ),
    SequenceRule("mamba", Mamba1.update, {"A": "spectrum", "dt": "small rows"}, key_width=16),
    SequenceRule("longhorn diagonal, 16 keys", LonghornDiagonal.update, {"beta": "rows"}, key_width=16),
    SequenceRule("adam", AdamNet.update, {"decay": "gate", "beta": "strength"}, erases=True),
    SequenceRule("lattice similarity", LatticeSim.update, {"gamma": "strength"}),
    SequenceRule("lattice encoding", LatticeEnc.update, {"gamma": "strength"}, erases=True),
    SequenceRule("lattice decoding", LatticeDec.update, {"gamma": "strength"}, erases=True),
    SequenceRule("lattice without norms", LatticeOSR.update, {"gamma": "strength", "decay": "gate"}, erases=True),
    SequenceRule("rls", RLSNet.update, {"decay": "gate", "beta": "strength"}),
    SequenceRule("shampoo", ShampooNet.update, {"decay": "gate", "beta": "strength"}),
    SequenceRule("rls, ten steps", _solved(Regression(10, 0.1)), {"decay": "gate", "beta": "strength"}),
    SequenceRule("shampoo, ten steps", _solved(Correlation(10)), {"decay": "gate", "beta": "strength"}),
    SequenceRule("muon", MuonNet.update, {"decay": "gate", "beta": "small strength"}, erases=True),
    SequenceRule("muon state", MuonNetState.update, {"beta": "strength"}, initial=0.1),
    SequenceRule("ttt mlp", TTTMLP.update, {"eta": "small strength"}, erases=True),
    SequenceRule("yaad mlp", Yaad.update, {**_SMALL_ROWS, "delta": "rows"}, erases=True),
    SequenceRule(
        "titans mlp", Titans.update, {"decay": "gate", "momentum": "gate", "theta": "small strength"}, erases=True
    ),
    SequenceRule("moneta mlp", Moneta.update, _SMALL_ROWS, erases=True, initial=5.0),
    SequenceRule("memora mlp", Memora.update, _SMALL_ROWS, erases=True, initial=1.0),
)


def read(signal: Signal) -> tuple[int, ...]:
    """The shape of the outputs."""
    v = signal["v"]
    return (*v.shape[:3], v.shape[-1])


def find(names: tuple[str, ...]) -> tuple[SequenceRule, ...]:
    """Rules by name; all without names."""
    known = {rule.name: rule for rule in RULES}
    for name in names:
        if name not in known:
            raise AxesError(f"unknown rule {name!r}; known: {', '.join(known)}")
    return tuple(known[name] for name in names) if names else RULES
