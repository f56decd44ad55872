"""Named tuples that the tests of the core run: one of every kind of system and of every route."""

from __future__ import annotations

from typing import Any

from axes.core.algorithms import Anchor, Held, Mix, Momentum, Read, Step, Sum
from axes.core.costs import (
    Alignment,
    CrossEntropy,
    Given,
    Huber,
    HuberSwitch,
    Linear,
    Lp,
    Ridge,
    RobustShift,
    SquaredError,
)
from axes.core.geometry import (
    Ball,
    Birkhoff,
    Bounded,
    Cautious,
    Cayley,
    Composite,
    Decayed,
    Eigenbasis,
    Entropic,
    Euclidean,
    FittedFactor,
    InverseRoot,
    Kronecker,
    LowRank,
    Lq,
    LqLiteral,
    NormedWhiten,
    Permutations,
    PowerFactors,
    RankOneWhiten,
    RelativeStep,
    RotatedWhiten,
    Shrink,
    SignBall,
    SoftThreshold,
    Spectral,
    Sphere,
    TrustRatio,
    Whiten,
)
from axes.core.memory import (
    MLP,
    BoundedList,
    Correlation,
    Entries,
    Fenwick,
    Kernel,
    LayerNormMatrix,
    List,
    Regression,
    Slots,
)
from axes.core.monoids import (
    DPLR,
    Decay,
    Diagonal,
    GeneralLinear,
    Hadamard,
    Householder,
    Product,
    Rotation,
    Scalar,
    Zero,
)
from axes.core.rates import Complement, Count, Per, maximum, minimum, where
from axes.core.state_update import OnUpdate, StateUpdate

BETA, ROW_BETA = Per("beta"), Per("row_beta", "row")


def ema(beta: float, **fields: object) -> Step:
    return Step(1 - beta, **fields)  # type: ignore[arg-type]


def second_moment(beta: float, *, debias: bool = True) -> StateUpdate:
    return StateUpdate(Linear("square"), monoid=Scalar(beta), algorithm=ema(beta, debias=debias))


def rank_one(beta: float, **guard: Any) -> RankOneWhiten:
    """An h that whitens by averages of the squares in rows and columns."""
    means = ("row-square", "column-square")
    averages = (StateUpdate(Linear(of), monoid=Scalar(beta), algorithm=ema(beta)) for of in means)  # type: ignore[arg-type]
    return RankOneWhiten(tuple(averages), **guard)


# Chains: affine in the state and its buffers.
CHAINS = {
    "linear attention": StateUpdate(Alignment()),
    "normalised linear attention": StateUpdate(Alignment(), algorithm=Step(debias=True)),
    "mlstm": StateUpdate(Alignment(), monoid=Scalar("decay"), algorithm=Step(BETA, debias=True, floor=0.4)),
    "retnet": StateUpdate(Alignment(), monoid=Scalar(0.9)),
    "mamba-2": StateUpdate(Alignment(), monoid=Scalar("decay"), algorithm=Step(BETA)),
    "gla": StateUpdate(Alignment(), monoid=Diagonal("key_decay")),
    "average of what the gates of its keys forget": StateUpdate(
        Alignment(), monoid=Diagonal("decay"), algorithm=Step(Complement(Per("decay", "key", "unit")))
    ),
    "normalised gla": StateUpdate(Alignment(), monoid=Diagonal("key_decay"), algorithm=Step(debias=True)),
    "row gate": StateUpdate(Alignment(), monoid=Diagonal("row_decay", side="row")),
    "mamba-1": StateUpdate(Alignment(), monoid=Hadamard("square_decay")),
    "deltanet": StateUpdate(SquaredError(), algorithm=Step(BETA)),
    "gated delta": StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(BETA, at="gated")),
    "gated delta, gradient first": StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(BETA)),
    "kda": StateUpdate(SquaredError(), monoid=Diagonal("key_decay"), algorithm=Step(BETA, at="gated")),
    "rwkv-7": StateUpdate(Alignment(), monoid=DPLR("key_decay")),
    "dplr delta": StateUpdate(SquaredError(), monoid=DPLR("key_decay"), algorithm=Step(BETA, at="gated")),
    "dplr delta, gradient first": StateUpdate(SquaredError(), monoid=DPLR("key_decay"), algorithm=Step(BETA)),
    "key rate": StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(Per("key_beta", "key"))),
    "longhorn": StateUpdate(SquaredError(), algorithm=Step(BETA, at="new")),
    "longhorn, vector rate": StateUpdate(SquaredError(), algorithm=Step(ROW_BETA, at="new")),
    "longhorn, diagonal": StateUpdate(SquaredError(), algorithm=Step(ROW_BETA, at="new"), memory=Entries()),
    "gated longhorn": StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(BETA, at="new")),
    "entries": StateUpdate(SquaredError(), monoid=Hadamard("square_decay"), algorithm=Step(BETA), memory=Entries()),
    "titans": StateUpdate(
        SquaredError(),
        monoid=Scalar("decay"),
        algorithm=Step(via=(StateUpdate(Linear(), monoid=Scalar("mu"), algorithm=Step(BETA)),)),
    ),
    "two filters": StateUpdate(
        SquaredError(),
        monoid=Scalar("decay"),
        algorithm=Step(BETA, at="gated", via=(Momentum(0.9, "ema", nesterov=True), Momentum(0.5, "sum"))),
    ),
    "two averages": StateUpdate(
        SquaredError(),
        monoid=Scalar("decay"),
        algorithm=Step(
            BETA,
            via=(
                Sum(
                    (
                        StateUpdate(Linear(), monoid=Scalar(0.9), algorithm=ema(0.9)),
                        StateUpdate(Linear(), monoid=Scalar(0.5)),
                    ),
                    (1.0, 2.0),
                ),
            ),
        ),
    ),
    "rotation": StateUpdate(Alignment(), monoid=Rotation(Per("angle", "pair", "real"))),
    "complex gates": StateUpdate(
        Alignment(),
        monoid=Product((Diagonal(Per("pair_decay", "pair", "unit"), "pair"), Rotation(Per("angle", "pair", "real")))),
        algorithm=Step(BETA),
    ),
    "gates of pairs, a delta rule": StateUpdate(
        SquaredError(),
        monoid=Product((Rotation(100.0), Diagonal(Per("pair_decay", "pair", "unit"), "pair"), Scalar("decay"))),
        algorithm=Step(BETA, at="gated"),
    ),
    "normalised, gates of pairs": StateUpdate(
        Alignment(), monoid=Diagonal(Per("pair_decay", "pair", "unit"), "pair"), algorithm=Step(debias=True)
    ),
    "rotated delta": StateUpdate(
        SquaredError(), monoid=Product((Scalar("decay"), Rotation(100.0))), algorithm=Step(BETA, at="gated")
    ),
    "householder": StateUpdate(Alignment(), monoid=Product((Scalar("decay"), Householder(BETA)))),
    "erase of its own strength": StateUpdate(
        Alignment(), monoid=Product((Scalar("decay"), Householder(Per("erase"), "k"))), algorithm=Step(BETA)
    ),
    "erase by key, write by row": StateUpdate(
        Alignment(),
        monoid=Product((Diagonal("key_decay"), Householder(Per("erase", "key"), "k"))),
        algorithm=Step(ROW_BETA),
    ),
    "two householders": StateUpdate(
        Alignment(), monoid=Product((Householder(BETA), Householder(Per("beta_2"), "w_2"), Diagonal("key_decay")))
    ),
    "birkhoff": StateUpdate(Alignment(), monoid=GeneralLinear(Per("logits", "mix", "real"), Birkhoff())),
    "permutations": StateUpdate(
        Alignment(), monoid=GeneralLinear(Per("logits", "permutation", "real"), Permutations())
    ),
    "rotation by cayley": StateUpdate(
        SquaredError(),
        monoid=Product((Scalar("decay"), GeneralLinear(Per("logits", "mix", "real"), Cayley()))),
        algorithm=Step(BETA, at="gated"),
    ),
    "row delta": StateUpdate(
        SquaredError(), monoid=Diagonal("row_decay", side="row"), algorithm=Step(ROW_BETA, at="gated")
    ),
    "ridge": StateUpdate(Ridge(SquaredError(), 0.1), monoid=Scalar("decay"), algorithm=Step(BETA)),
    "ridge by row": StateUpdate(Ridge(Alignment(), Per("row_ridge", "row")), algorithm=Step(0.5)),
    "memoryless": StateUpdate(Alignment(), monoid=Zero()),
}

# Chains that are read between two states.
EARLY = {
    "current token bonus": StateUpdate(
        Alignment(), monoid=GeneralLinear(Per("logits", "mix", "real"), Cayley()), algorithm=Step(read=Read(1.0, 2.0))
    ),
    "rwkv-6": StateUpdate(
        Alignment(), monoid=Diagonal("key_decay"), algorithm=Step(read=Read(1.0, Per("bonus", "key", "real")))
    ),
    "early read by row": StateUpdate(
        Alignment(), monoid=Diagonal("row_decay", side="row"), algorithm=Step(BETA, read=Read(0.9, ROW_BETA))
    ),
    "early delta": StateUpdate(
        SquaredError(),
        monoid=Product((Scalar("decay"), Householder(Per("erase")))),
        algorithm=Step(BETA, at="gated", read=Read(Per("seen"), Per("bonus", "key", "real"))),
    ),
    "early longhorn": StateUpdate(
        SquaredError(), monoid=Diagonal("key_decay"), algorithm=Step(BETA, at="new", read=Read(1.0, BETA))
    ),
}

# Chains whose rows turn in pairs.
_ROW_PAIRS = Diagonal(Per("row_pair_decay", "row-pair", "unit"), "row-pair")
_TURN = Rotation(Per("row_angle", "row-pair", "real"))
TURNED = {
    "complex rows": StateUpdate(Alignment(), monoid=Product((_ROW_PAIRS, _TURN)), algorithm=Step(BETA)),
    "turning values": StateUpdate(Alignment(), monoid=Product((_TURN, Diagonal("key_decay"), Rotation(30.0)))),
    "turning delta": StateUpdate(
        SquaredError(), monoid=Product((_TURN, Scalar("decay"))), algorithm=Step(BETA, at="gated", writes=2)
    ),
    "turning delta alone": StateUpdate(SquaredError(), monoid=_TURN, algorithm=Step(BETA, at="gated")),
}

# Several writes a token.
SEVERAL = {
    "delta product": StateUpdate(SquaredError(), algorithm=Step(BETA, writes=2)),
    "gated delta product": StateUpdate(
        SquaredError(), monoid=Scalar("decay"), algorithm=Step(BETA, at="gated", writes=3)
    ),
    "several reads": StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(BETA, at="gated", reads=3)),
    "several writes and reads": StateUpdate(
        Alignment(),
        monoid=Product((Diagonal("key_decay"), Rotation(Per("angle", "pair", "real")))),
        algorithm=Step(BETA, writes=2, reads=2),
    ),
    "read twice, normalised": StateUpdate(
        Alignment(), monoid=Scalar("decay"), algorithm=Step(BETA, reads=2, debias=True)
    ),
    "householder between writes": StateUpdate(
        Alignment(), monoid=Product((Diagonal("key_decay"), Householder(Per("erase")))), algorithm=Step(writes=2)
    ),
}

# Attention: a list memory.
ATTENTION = {
    "softmax": StateUpdate(Alignment(), Entropic(), memory=List()),
    "softmax, mass n": StateUpdate(Alignment(), Entropic(mass=None), memory=List()),
    "alibi": StateUpdate(Alignment(), Entropic(), Scalar(0.9), memory=List()),
    "fox": StateUpdate(Alignment(), Entropic(), Scalar("decay"), Step(BETA), memory=List()),
    "rope": StateUpdate(Alignment(), Entropic(), Rotation(), memory=List()),
    "path": StateUpdate(Alignment(), Entropic(), Householder(BETA), memory=List()),
    "deltaformer": StateUpdate(SquaredError(), Entropic(), memory=List()),
    "deltaformer, forgetting": StateUpdate(SquaredError(), Entropic(), Scalar("decay"), Step(BETA), memory=List()),
    "deltaformer, mass n": StateUpdate(SquaredError(), Entropic(mass=None), Rotation(), Step(BETA), memory=List()),
    "deltaformer, turned first": StateUpdate(
        SquaredError(), Entropic(), Product((Scalar("decay"), Rotation())), Step(at="gated"), memory=List()
    ),
    "errors by an exponential": StateUpdate(SquaredError(), Entropic(), memory=List(errors=Kernel())),
    "errors by another kernel, forgetting": StateUpdate(
        SquaredError(), Entropic(), Scalar("decay"), Step(BETA, at="gated"), List(errors=Kernel("linear", 0.8))
    ),
    "errors by another kernel, before the gate": StateUpdate(
        SquaredError(), Entropic(), Product((Scalar("decay"), Rotation())), Step(BETA), List(errors=Kernel(scale=2.0))
    ),
    "fox with path": StateUpdate(
        Alignment(), Entropic(), Product((Scalar("decay"), Householder(BETA))), memory=List(scale=1.0)
    ),
    "list as matrix": StateUpdate(Alignment(), Euclidean(), Scalar("decay"), Step(BETA), memory=List(scale=1.0)),
    "rotated list as matrix": StateUpdate(
        Alignment(), Euclidean(), Product((Scalar("decay"), Rotation())), Step(BETA), memory=List(scale=1.0)
    ),
}

# Bounded memories: two chains with h between them.
SLOT_DECAY, SLOT_WRITE = Per("slot_decay", "own", "unit", size=5), Per("slot_write", "own", size=5)
PASSES = {
    "gated slots": StateUpdate(
        Alignment(), Entropic(), Diagonal(SLOT_DECAY, "slot"), Step(SLOT_WRITE), memory=BoundedList(5)
    ),
    "slots as means": StateUpdate(
        Alignment(), Entropic(), Scalar(0.9), Step(SLOT_WRITE, debias=True), BoundedList(5, scale=None)
    ),
    "forgetting slots, a floor": StateUpdate(
        Alignment(),
        Entropic(mass=None),
        Product((Scalar("decay"), Diagonal(SLOT_DECAY, "slot"))),
        Step(BETA, debias=True, floor=0.3),
        memory=BoundedList(5, scale=None),
    ),
    "conjugate gradients": StateUpdate(
        Alignment(), monoid=Scalar("decay"), algorithm=Step(BETA), memory=Regression(3, 0.4)
    ),
    "correlations by shifts": StateUpdate(
        Alignment(), monoid=Scalar("decay"), algorithm=Step(BETA), memory=Correlation(2, 3, 0.4, 50.0)
    ),
}

# Levels: a chain whose stretches are weighed.
LEVELS = {
    "log-linear": StateUpdate(Alignment(), monoid=Scalar("decay"), algorithm=Step(BETA), memory=Fenwick(9)),
    "log-linear, few levels": StateUpdate(Alignment(), monoid=Diagonal("key_decay"), memory=Fenwick(4)),
    "log-linear delta": StateUpdate(
        Alignment(),
        monoid=Product((Scalar("decay"), Householder(Per("erase"), "k"))),
        algorithm=Step(BETA),
        memory=Fenwick(8),
    ),
    "log-linear, turning": StateUpdate(Alignment(), monoid=Product((Rotation(30.0), Scalar(0.9))), memory=Fenwick(9)),
    "log-linear, nothing forgotten": StateUpdate(Alignment(), memory=Fenwick(2)),
}

# Gram space: normalised slots.
GRAM = {
    "lattice sim": StateUpdate(Alignment(), Sphere("columns"), Scalar("decay"), Step(BETA, lazy=False), memory=Slots()),
    "lattice enc": StateUpdate(
        SquaredError(encode=True), Sphere("columns"), Scalar("decay"), Step(BETA, lazy=False), memory=Slots()
    ),
    "lattice dec": StateUpdate(SquaredError(), Sphere("columns"), algorithm=Step(BETA, lazy=False), memory=Slots()),
    "lattice dec, forgetting": StateUpdate(
        SquaredError(), Sphere("columns"), Scalar("decay"), Step(BETA, lazy=False), memory=Slots()
    ),
    "lattice, unnormalised": StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(BETA), memory=Slots()),
}

# Cascades: no feedback inside a chunk.
CASCADES = {
    "memora": StateUpdate(
        SquaredError(), Entropic("row", None), Diagonal("row_decay", side="row"), Step(ROW_BETA, at=Anchor(4))
    ),
    "memora, whole": StateUpdate(SquaredError(), Entropic("whole"), Scalar("decay"), Step(BETA, at=Anchor(4))),
    "moneta": StateUpdate(Lp(3.0), Lq(4.0), Scalar("decay"), Step(BETA, at=Anchor(3))),
    "soft threshold": StateUpdate(SquaredError(), SoftThreshold(0.1), Scalar("decay"), Step(BETA, at=Anchor(4))),
    "muon net": StateUpdate(
        SquaredError(),
        OnUpdate(Spectral(method="newton-schulz")),
        Scalar("decay"),
        Step(BETA, at=Anchor(4), via=(Momentum(0.9, "ema", nesterov=True),)),
    ),
    "adam net": StateUpdate(
        Alignment(),
        Euclidean(),
        Scalar("decay"),
        Step(
            BETA,
            via=(StateUpdate(Linear(), Whiten((second_moment(0.95),)), Scalar(0.9), ema(0.9, debias=True)),),
        ),
    ),
    "linear attention whitened by rows and columns": StateUpdate(
        Alignment(),
        monoid=Scalar("decay"),
        algorithm=Step(
            BETA, via=(StateUpdate(Linear(), rank_one(0.8, eps=0.3, guard="floor"), Scalar(0.9), ema(0.9)),)
        ),
    ),
    "projected linear attention": StateUpdate(Alignment(), Sphere("rows"), Diagonal("key_decay"), Step(BETA)),
    "ttt mlp": StateUpdate(SquaredError(), algorithm=Step(BETA, at=Anchor(4)), memory=MLP(2)),
    "titans mlp": StateUpdate(
        SquaredError(),
        monoid=Scalar("decay"),
        algorithm=Step(at=Anchor(4), via=(StateUpdate(Linear(), monoid=Scalar("mu"), algorithm=Step(BETA)),)),
        memory=MLP(2),
    ),
    "memora mlp": StateUpdate(
        SquaredError(),
        Entropic("row", None),
        Diagonal("row_decay", side="row"),
        Step(ROW_BETA, at=Anchor(4)),
        memory=MLP(2),
    ),
}

# A solve, or roots, for one vector a token: the state stands between powers of its statistics.
SOLVES = {
    "rls": StateUpdate(
        Alignment(),
        Whiten((StateUpdate(Linear("key"), memory=None),), kind="right", power=1.0, eps=0.5),
    ),
    "correlations": StateUpdate(
        Alignment(),
        Whiten(
            (
                StateUpdate(Linear("value"), monoid=Scalar(0.9), algorithm=Step(BETA), memory=None),
                StateUpdate(Linear("key"), monoid=Scalar("decay"), memory=None),
            ),
            kind="kronecker",
            power=0.5,
            eps=0.3,
        ),
        Scalar("decay"),
        Step(BETA),
    ),
}

# Chains whose rows differ, which are substitutions with one system a row.
BY_ROWS = ("longhorn, vector rate", "row delta")

# Substitution: only what is written is nonlinear, or all of it is known.
SUBSTITUTIONS = {
    "yaad": StateUpdate(Huber(ROW_BETA), Euclidean(), Scalar("decay"), Step(BETA, at=Anchor(4))),
    "ttt": StateUpdate(SquaredError(), algorithm=Step(BETA, at=Anchor(4)), memory=LayerNormMatrix()),
    "frank-wolfe on a ball, anchored": StateUpdate(
        SquaredError(), OnUpdate(Sphere("whole")), Diagonal("row_decay", side="row"), Step(BETA, at=Anchor(5))
    ),
    "gated longhorn, vector rate": StateUpdate(
        SquaredError(), monoid=Scalar("decay"), algorithm=Step(ROW_BETA, at="new")
    ),
    "ttt, every token": StateUpdate(SquaredError(), algorithm=Step(BETA), memory=LayerNormMatrix()),
    "huber, every token": StateUpdate(Huber(1.0), monoid=Scalar("decay"), algorithm=Step(BETA)),
    "huber, norm": StateUpdate(Huber(0.5, "norm"), monoid=Scalar("decay"), algorithm=Step(BETA, at="gated")),
    "huber, implicit": StateUpdate(Huber(0.5), monoid=Scalar("decay"), algorithm=Step(BETA, at="new")),
    "huber switch": StateUpdate(HuberSwitch(0.5), monoid=Scalar("decay"), algorithm=Step(BETA)),
    "robust shift": StateUpdate(RobustShift(0.2), monoid=Scalar("decay"), algorithm=Step(BETA)),
    "cross-entropy": StateUpdate(CrossEntropy(), monoid=Scalar("decay"), algorithm=Step(BETA)),
    "huber by rows": StateUpdate(Huber(ROW_BETA), monoid=Diagonal("row_decay", side="row"), algorithm=Step(ROW_BETA)),
    "huber by rows, gate first": StateUpdate(
        Huber(0.5, "norm"), monoid=Diagonal("row_decay", side="row"), algorithm=Step(ROW_BETA, at="gated")
    ),
    "frank-wolfe on a ball": StateUpdate(SquaredError(), OnUpdate(Sphere("whole")), Scalar("decay"), Step(BETA)),
    "delta rule by the signs of its rows": StateUpdate(
        SquaredError(), OnUpdate(Sphere("rows", 0.5)), Product((Scalar(0.9), Scalar("decay"))), Step(BETA, at="gated")
    ),
}

# The rest: exact nonlinear recurrences, which only the interpreter computes.
SEQUENTIAL = {
    "linear attention that keeps what low rank left out": StateUpdate(
        Alignment(),
        monoid=Scalar("decay"),
        algorithm=Step(
            via=(
                StateUpdate(
                    Linear(),
                    LowRank((StateUpdate(Linear("state"), PowerFactors(2), Zero(), Step(at=Held(1))),)),
                    Scalar(0.7),
                    Step(feedback=0.5),
                ),
            )
        ),
    ),
    "delta rule that keeps what a threshold left out": StateUpdate(
        SquaredError(),
        algorithm=Step(BETA, via=(StateUpdate(Linear(), SoftThreshold(0.1), algorithm=Step(feedback=1.0)),)),
    ),
    "delta rule whose rows shrink after the step": StateUpdate(
        SquaredError(), Shrink(Per("kept", "row")), algorithm=Step(BETA, lazy=False)
    ),
    "delta rule in proportion to the memory": StateUpdate(
        SquaredError(),
        algorithm=Step(
            BETA,
            via=(
                StateUpdate(
                    Linear(), TrustRatio(Decayed(Euclidean(), Per("pull")), 0.5, "parts"), Scalar(0.9), ema(0.9)
                ),
            ),
        ),
    ),
    "max pooling": StateUpdate(Alignment(), monoid=Scalar("decay"), algorithm=Step(write="max")),
    "delta rule that keeps the larger": StateUpdate(
        SquaredError(),
        monoid=Diagonal("row_decay", side="row"),
        algorithm=Step(BETA, write="max", via=(Momentum(0.5, "ema"),)),
    ),
    "a step that shrinks with the number of the token": StateUpdate(
        SquaredError(), monoid=Scalar("decay"), algorithm=Step(BETA / Count() ** 0.5, via=(Momentum(0.5, "ema"),))
    ),
    "mlp, every token": StateUpdate(SquaredError(), algorithm=Step(BETA), memory=MLP(2)),
    "moneta, literal link": StateUpdate(Lp(3.0), LqLiteral(4.0), Scalar("decay"), Step(0.3)),
    "lattice sim, lazy sphere": StateUpdate(Alignment(), Sphere("columns"), algorithm=Step(BETA), memory=Slots()),
    "ista": StateUpdate(SquaredError(), SoftThreshold(0.05), Scalar("decay"), Step(BETA, lazy=False)),
    "soft-threshold ftrl": StateUpdate(SquaredError(), SoftThreshold(0.05), Scalar("decay"), Step(BETA)),
    "entropic delta": StateUpdate(SquaredError(), Entropic("row"), Scalar("decay"), Step(BETA)),
    "entropic, implicit": StateUpdate(SquaredError(), Entropic("row"), Scalar("decay"), Step(BETA, at="new")),
    "l_q, implicit": StateUpdate(SquaredError(), Lq(3.0), Scalar("decay"), Step(BETA, at="new")),
    "bounded": StateUpdate(SquaredError(), Bounded(), Scalar("decay"), Step(BETA, at="gated")),
    "several steps": StateUpdate(SquaredError(), monoid=Scalar("decay"), algorithm=Step(BETA, steps=3)),
    "frank-wolfe": StateUpdate(SquaredError(), OnUpdate(SignBall()), Scalar("decay"), Step(BETA)),
    "rotated spectral": StateUpdate(Alignment(), Spectral("polar"), Rotation(Per("angle", "pair", "real")), Step(BETA)),
}

KEYED = {
    **CHAINS, **EARLY, **TURNED, **SEVERAL, **ATTENTION, **PASSES, **LEVELS, **GRAM, **CASCADES, **SOLVES,
    **SUBSTITUTIONS, **SEQUENTIAL,
}  # fmt: skip

# Updates of a parameter: the gradient is given.
DATA = {
    "sgd": StateUpdate(Given(), algorithm=Step(0.1)),
    "heavy ball, decoupled decay": StateUpdate(
        Given(), monoid=Decay(0.01), algorithm=Step(Per("lr"), via=(Momentum(0.9, "sum"),))
    ),
    "averaged from the second": StateUpdate(
        Given(),
        algorithm=Step(
            0.1,
            via=(StateUpdate(Linear(), monoid=Scalar(0.9), algorithm=Step(0.1, debias=True, start="second")),),
        ),
    ),
    "dampened from the first": StateUpdate(Given(), algorithm=Step(0.1, via=(Momentum(0.9, "ema", start="first"),))),
    "nesterov, coupled decay": StateUpdate(
        Ridge(Given(), 0.01), algorithm=Step(0.1, via=(Momentum(0.9, "sum", nesterov=True),))
    ),
    "adamw": StateUpdate(
        Given(),
        monoid=Decay(0.01),
        algorithm=Step(
            0.1, via=(StateUpdate(Linear(), Whiten((second_moment(0.95),)), Scalar(0.9), ema(0.9, debias=True)),)
        ),
    ),
    "adagrad": StateUpdate(
        Given(), algorithm=Step(0.1, via=(StateUpdate(Linear(), Whiten((StateUpdate(Linear("square")),)), Zero()),))
    ),
    "lion": StateUpdate(
        Given(),
        monoid=Decay(0.1),
        algorithm=Step(
            0.1, via=(StateUpdate(Linear(), SignBall(), Scalar(0.99), Step(1 - 0.99, read=Read(0.9, 1 - 0.9))),)
        ),
    ),
    "muon": StateUpdate(
        Given(),
        OnUpdate(Spectral()),
        Decay(0.1),
        Step(0.1, via=(Momentum(0.95, "ema", nesterov=True),)),
    ),
    "shampoo": StateUpdate(
        Given(),
        algorithm=Step(
            0.1,
            via=(
                StateUpdate(
                    Linear(),
                    Whiten(
                        (StateUpdate(Linear("left")), StateUpdate(Linear("right"))),
                        kind="kronecker",
                        power=0.25,
                        eps=0.1,
                    ),
                    Zero(),
                ),
            ),
        ),
    ),
    "soap": StateUpdate(
        Given(),
        algorithm=Step(
            0.1,
            via=(
                StateUpdate(
                    Linear(),
                    RotatedWhiten(
                        (
                            StateUpdate(Linear("left"), Eigenbasis(), Scalar(0.9), Step(0.1)),
                            StateUpdate(Linear("right"), Eigenbasis(), Scalar(0.9), Step(0.1)),
                            StateUpdate(Linear("eigen-square"), monoid=Scalar(0.95), algorithm=Step(0.05, debias=True)),
                        ),
                        eps=1e-3,
                    ),
                    Scalar(0.9),
                    Step(0.1, debias=True),
                ),
            ),
        ),
    ),
    "shampoo, held roots": StateUpdate(
        Given(),
        algorithm=Step(
            0.1,
            via=(
                StateUpdate(
                    Linear(),
                    Kronecker(
                        (
                            StateUpdate(Linear("left"), InverseRoot(0.25, 0.1), Scalar(0.9), Step(at=Held(3))),
                            StateUpdate(
                                Linear("right"),
                                InverseRoot(0.5, 0.1, 1e-2, "newton"),
                                algorithm=Step(at=Held(2, "excluded")),
                            ),
                        ),
                    ),
                    Zero(),
                ),
            ),
        ),
    ),
    "psgd-kron": StateUpdate(
        Given(),
        algorithm=Step(
            0.1,
            via=(
                StateUpdate(
                    Linear(),
                    Kronecker(
                        (
                            StateUpdate(
                                Linear("white-left"), FittedFactor(0.3, 0.1), Zero(), Step(at=Held(2, "excluded"))
                            ),
                            StateUpdate(
                                Linear("white-right"), FittedFactor(0.2, 0.2), Scalar(0.5), Step(0.5, at=Held(1))
                            ),
                        ),
                    ),
                    Scalar(0.9),
                    Step(0.1, debias=True),
                ),
            ),
        ),
    ),
    "averaged weights": StateUpdate(  # x = 0.9 x + 0.1 z of z = z + 0.2 u, both from W_0
        Given(),
        monoid=Scalar(0.9),
        algorithm=Step(0.1, via=(StateUpdate(Linear(), algorithm=Step(0.2, start="W0")),)),
    ),
    "cautious adam": StateUpdate(
        Given(),
        OnUpdate(Cautious(Whiten((second_moment(0.95),)))),
        algorithm=Step(0.1, via=(Momentum(0.9, "ema", debias=True),)),
    ),
    "lamb": StateUpdate(
        Given(),
        OnUpdate(TrustRatio(Whiten((second_moment(0.95),)))),
        algorithm=Step(0.1, via=(Momentum(0.9, "ema", debias=True),)),
    ),
    "lamb with decay": StateUpdate(
        Given(),
        algorithm=Step(
            0.1,
            via=(
                StateUpdate(
                    Linear(),
                    TrustRatio(Decayed(Whiten((second_moment(0.95),)), Per("weight_decay")), bounds=(3.0, 4.0)),
                    Scalar(0.9),
                    ema(0.9, debias=True),
                ),
            ),
        ),
    ),
    "row and column whitening": StateUpdate(
        Given(),
        monoid=Decay(0.01),
        algorithm=Step(0.1, via=(StateUpdate(Linear(), rank_one(0.9, eps=0.1), Zero()),)),
    ),
    "row whitening": StateUpdate(
        Given(),
        algorithm=Step(
            0.1,
            via=(
                Momentum(0.9, "ema"),
                StateUpdate(
                    Linear(), NormedWhiten((StateUpdate(Linear("row-square"), monoid=Scalar(0.7)),), 0.1), Zero()
                ),
            ),
        ),
    ),
    "rows that shrink after the step": StateUpdate(
        Given(), Shrink(Per("kept", "row")), Decay(0.05), Step(0.1, lazy=False, via=(Momentum(0.9, "ema"),))
    ),
    "a clipped and relative step": StateUpdate(
        Given(),
        monoid=Decay(0.01),
        algorithm=Step(
            minimum(0.3, Count() ** -0.5),
            via=(
                StateUpdate(Linear(), RelativeStep(Composite(Ball(0.9, "rms"), rank_one(0.9, eps=0.1)), 1.5), Zero()),
            ),
        ),
    ),
    "dion": StateUpdate(
        Given(),
        monoid=Decay(0.05),
        algorithm=Step(
            0.1,
            via=(
                StateUpdate(
                    Linear(),
                    LowRank((StateUpdate(Linear("state"), PowerFactors(2), Zero(), Step(at=Held(1))),), "spectral"),
                    algorithm=Step(feedback=0.2),
                ),
            ),
        ),
    ),
    "what clipping left out": StateUpdate(
        Given(),
        algorithm=Step(0.1, via=(StateUpdate(Linear(), Ball(0.7), Scalar(0.9), Step(feedback=1.0)),)),
    ),
    "entry whitening of a known size": StateUpdate(
        Given(),
        algorithm=Step(
            0.1,
            via=(
                StateUpdate(
                    Linear(), NormedWhiten((StateUpdate(Linear("square"), monoid=Scalar(0.7)),), 0.1, 0.2), Zero()
                ),
            ),
        ),
    ),
    "lars": StateUpdate(
        Given(),
        algorithm=Step(
            0.5,
            via=(
                StateUpdate(Linear(), TrustRatio(Decayed(Euclidean(), 0.2), 0.3, "parts"), Zero()),
                Momentum(0.9, "sum"),
            ),
        ),
    ),
    "exponentiated gradient": StateUpdate(Given(), Entropic("row"), algorithm=Step(0.5)),
    "schedule-free": StateUpdate(Given(), algorithm=Step(0.1, at="read", read=Read(0.5, 0.05))),
    "weights between their average and themselves": StateUpdate(
        Given(),
        monoid=Decay(1.0),
        algorithm=Step(0.2, at="read", via=(StateUpdate(Linear(), algorithm=Step(0.3, start="W0")),), read=Mix(0.7)),
    ),
    "gated gradient": StateUpdate(Given(), monoid=Scalar(0.9), algorithm=Step(0.1, at="gated")),
    "largest second moment": StateUpdate(
        Given(),
        algorithm=Step(
            0.1,
            via=(
                StateUpdate(
                    Linear(),
                    Whiten(
                        (
                            StateUpdate(
                                Linear("square", offset=0.1),
                                monoid=Zero(),
                                algorithm=Step(
                                    1.0 / (1.0 - 0.5 ** Count()),
                                    via=(Momentum(0.5, "ema"), StateUpdate(Linear(), algorithm=Step(write="max"))),
                                ),
                            ),
                        ),
                        eps=1e-3,
                    ),
                    Scalar(0.9),
                ),
            ),
        ),
    ),
    "one second moment of two averages": StateUpdate(
        Given(),
        algorithm=Step(
            0.1,
            via=(
                StateUpdate(
                    Linear(),
                    Whiten(
                        (
                            StateUpdate(Linear("square", raw=True), monoid=Scalar(0.9), algorithm=Step(start=0.5)),
                            StateUpdate(Linear("drive", raw=True), monoid=Scalar(0.5), algorithm=Step(0.5)),
                        ),
                        "centered",
                        eps=1e-3,
                    ),
                    Zero(),
                    Step(
                        via=(
                            Sum(
                                (
                                    StateUpdate(
                                        Linear(),
                                        Whiten(
                                            (StateUpdate(Linear("unit"), monoid=Scalar(0.6), algorithm=Step(0.4)),),
                                            power=1.0,
                                        ),
                                        Scalar(0.5),
                                    ),
                                    StateUpdate(Linear(), monoid=Scalar(0.9)),
                                ),
                                (1.0, 0.3),
                            ),
                        ),
                        read=Mix(where(Count() > 2, 0.8, 0.1)),
                    ),
                ),
            ),
        ),
    ),
    "whitened by what was before": StateUpdate(
        Given(),
        algorithm=Step(
            0.1,
            via=(
                StateUpdate(
                    Linear(),
                    Whiten(
                        (StateUpdate(Linear("square"), monoid=Scalar(0.8), algorithm=Step(0.2, read=Read(1.0, 0.0))),),
                        eps=0.1,
                        floor=0.6,
                    ),
                    Zero(),
                ),
                StateUpdate(Linear(), Ball(0.3 * Count() ** 0.5, "max"), Zero()),
                StateUpdate(
                    Linear(),
                    Whiten(
                        (
                            StateUpdate(
                                Linear("white-square"), monoid=Scalar(0.7), algorithm=Step(0.3, read=Read(1.0, 0.0))
                            ),
                        ),
                        power=-0.5,
                        eps=0.01,
                        eps_inside=True,
                    ),
                    Zero(),
                ),
            ),
        ),
    ),
    "average that is not shown": StateUpdate(
        Given(),
        monoid=Decay(1.0),
        algorithm=Step(
            1.0 / Count(),
            at="read",
            via=(StateUpdate(Linear(), algorithm=Step(0.3, start="W0")),),
            read=Mix(0.0),
        ),
    ),
    "rates by the number of the datum": StateUpdate(
        Given(),
        monoid=Decay(where(Count() > 2, 0.1, 0.0)),
        algorithm=Step(
            Per("lr") / (1.0 + 0.1 * (Count() - 1.0)),
            via=(
                StateUpdate(Linear(), monoid=Scalar(1.0 - 0.7 * Count() ** -0.8), algorithm=Step(0.5 / Count())),
                Sum(
                    (StateUpdate(Linear(), monoid=Scalar(0.9)), StateUpdate(Linear())),
                    (1.0, maximum(0.3, 1.0 / Count())),
                ),
                StateUpdate(Linear(), monoid=Scalar(0.5), algorithm=Step(read=Read(0.9 / Count(), 0.4))),
            ),
        ),
    ),
}

SYSTEMS = {**KEYED, **DATA}
