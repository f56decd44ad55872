"""How the tile of a walk lies over the threads of a Hopper GPU: by what its step sums, and by nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from axes import sequence
from axes.core.algorithms import Momentum, Step
from axes.core.costs import SquaredError
from axes.core.geometry import Sphere
from axes.core.monoids import Scalar
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.programs import tile_kernels
from axes.programs.tile_text import Walk, source
from axes.routes import token

SHARED = 227 * 1024  # bytes of a processor
PICKED = {
    "lattice-dec": sequence.LatticeDec.update,
    "lattice-osr": sequence.LatticeOSR.update,
    "moneta": sequence.MonetaMatrix.update,
    "memora": sequence.MemoraMatrix.update,
    "adam": sequence.AdamNet.update,
}
TWO_TILES = StateUpdate(
    SquaredError(), Sphere("columns"), Scalar("decay"), Step(Per("beta"), via=(Momentum(0.9, "ema", debias=True),))
)


def walk(update: StateUpdate, d_v: int = 64, d_k: int = 64) -> Walk:
    found = token.walk(update, d_v, d_k)
    assert isinstance(found, Walk)
    return found


@pytest.mark.parametrize("name", PICKED)
def test_every_entry_has_a_thread_and_a_span_fits(name: str) -> None:
    plain = walk(PICKED[name])
    assert plain.hopper is not None
    for told in plain.hopper:
        assert told.threads is not None
        lanes, warps = told.threads
        assert lanes[0] * lanes[1] == 32 and warps[0] * warps[1] == told.warps
        assert told.rows % (lanes[0] * warps[0]) == 0 and told.keys % (lanes[1] * warps[1]) == 0
        assert told.chunk == plain.chunk and told.chunk % told.span == 0 and told.kept == plain.hopper[0].kept
        tiles = sum(told.span for n in told.read if told.near(n, gluon=True))
        assert 0 < tiles * told.rows * told.keys * 4 * told.parts <= SHARED  # programs of a head share a processor
        assert "allocate_shared_memory" in source(told, gluon=True) and "gluon" not in source(told)


@pytest.mark.parametrize("length", (4096, 700))
@pytest.mark.parametrize("name", PICKED)
def test_what_training_takes_is_said(name: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, given = walk(PICKED[name]), dict[int, Tensor]()
    assert plain.hopper is not None
    monkeypatch.setattr(tile_kernels, "_on", lambda *_: plain.hopper)

    def launch(walk: Walk, name: str, language: str, like: Tensor, wide: object, units: int, took: object, *_: object):  # type: ignore[no-untyped-def]
        assert isinstance(took, list)
        given.update({id(x): x for x in took if isinstance(x, Tensor)})

    monkeypatch.setattr(tile_kernels, "_launch", launch)
    shape = 8, length, 16
    inputs = [
        torch.empty(*shape, *([64] * sum(e)), dtype=torch.bfloat16 if n in "qkv" else torch.float32, device="meta")
        for n, e in plain.inputs.items()
    ]
    states = [torch.empty(8, 16, *([64] * sum(e)), device="meta") for e in plain.states.values()]
    out, last = tile_kernels.tokens(plain, [x.requires_grad_() for x in inputs], states)
    pull = torch.empty_like(out)
    torch.autograd.backward([out, *last], [pull, *map(torch.empty_like, last)])
    own = {id(x) for x in (*inputs, *states, out, pull)}
    rest = [x for i, x in given.items() if i not in own and x.shape[:2] != (8, 16)]
    back = plain.hopper[1]
    grads = sum(x.nbytes for x, e in zip(inputs, plain.inputs.values(), strict=True) if back.alone(e))
    taken = sum(x.nbytes for x in rest) - grads
    assert taken == tile_kernels.beyond(*plain.hopper, shape, [x.dtype for x in inputs])
    assert taken < 1.5e9


def test_sums_that_a_step_makes_say_what_lies_across_warps() -> None:
    columns, numbers, apart = (walk(PICKED[n]).hopper for n in ("lattice-dec", "moneta", "memora"))
    assert columns is not None and numbers is not None and apart is not None
    for told in columns:
        assert told.threads is not None and told.threads.warps[0] == 1 < told.threads.warps[1]
    for told in numbers:
        assert told.threads is not None and told.threads.warps[1] == 1 < told.threads.warps[0]
    for told in apart:
        assert told.warps == 1 and told.parts == 8


def test_tokens_of_a_turn() -> None:
    names = "memora", "moneta", "lattice-osr", "lattice-dec"
    turns = {n: tuple(told.unroll for told in walk(PICKED[n]).hopper or ()) for n in names}
    assert turns == {"memora": (2, 1), "moneta": (2, 1), "lattice-osr": (1, 1), "lattice-dec": (2, 1)}


def test_a_wide_state_has_twice_the_warps() -> None:
    wide = walk(PICKED["lattice-dec"], 128, 128).hopper
    assert wide is not None and [told.warps for told in wide] == [8, 8]
    assert wide[1].inner == 2 and wide[1].reread  # 128 KiB


def test_what_was_not_measured_is_laid_out_by_the_compiler() -> None:
    assert walk(PICKED["lattice-dec"], 40, 56).hopper is None and walk(PICKED["memora"], 128, 64).hopper is None
    assert sum(e == (True, True) for e in walk(TWO_TILES).states.values()) > 1 and walk(TWO_TILES).hopper is None
