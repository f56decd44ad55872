"""Launches of every kernel as its entries make them, to be compiled for sm_90 without a GPU: by `tests.compiler`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from axes.core.state_update import StateUpdate
from axes.kernels import contain as contain_module
from axes.kernels.attention import attend as attend_module
from axes.kernels.attention.attend import attend
from axes.kernels.attention.contain import contain as read_again
from axes.kernels.attention.contain import contain_carried
from axes.kernels.attention.decode import attend_one
from axes.kernels.attention.decode_carried import carry_one
from axes.kernels.attention.transport import transport
from axes.kernels.attention.turn import turn
from axes.kernels.block import chain as block_module
from axes.kernels.block import hopper as hopper_block
from axes.kernels.block.chain import block_chain
from axes.kernels.blocks.bonus import leave_bonus
from axes.kernels.blocks.enter import enter
from axes.kernels.blocks.leave import leave
from axes.kernels.blocks.plan import Numbers, Plan, Stream
from axes.kernels.blocks.removal import removal
from axes.kernels.blocks.shift import mixed_products
from axes.kernels.common.gluon import gl, gluon, mbarrier
from axes.kernels.common.launch import Kernel
from axes.kernels.common.warpgroup import retire
from axes.kernels.diagonal import hopper as hopper_diagonal
from axes.kernels.diagonal.chain import diagonal_chain
from axes.kernels.diagonal.rows import rows_chain
from axes.kernels.diagonal_delta import chain as diagonal_delta
from axes.kernels.diagonal_delta import hopper as hopper_diagonal_delta
from axes.kernels.entries.chain import Erase, entries_chain
from axes.kernels.entries.modes import modes_chain
from axes.kernels.levels.chain import levels_chain
from axes.kernels.levels.contain import contain as contain_levels
from axes.kernels.levels.inside import levels_inside
from axes.kernels.network import hopper_hold
from axes.kernels.network.chain import Terms, network_chain
from axes.kernels.products import hopper_symmetric
from axes.kernels.products.iterated import newton_schulz
from axes.kernels.products.outer import outer_sum
from axes.kernels.products.symmetric import symmetric_product
from axes.kernels.recurrent import hold as recurrent_hold
from axes.kernels.recurrent.chain import recurrent_chain
from axes.kernels.recurrent.matrix import matrix_chain
from axes.kernels.recurrent.sizes import CELLS
from axes.kernels.rows.aside import set_aside
from axes.kernels.rows.gated import gated
from axes.kernels.rows.mass import over_mass
from axes.kernels.rows.norm import add_norm
from axes.kernels.rows.scaled import scale, scale_backward
from axes.kernels.scalar import chain as scalar_module
from axes.kernels.scalar import hopper_write
from axes.kernels.scalar.chain import scalar_chain
from axes.kernels.scalar.mass import mass_chain
from axes.kernels.scalar.mean import mean_chain
from axes.kernels.step import block_step, chain_step
from axes.kernels.streams.cayley import cayley
from axes.kernels.streams.follow import write_look
from axes.kernels.streams.look import look
from axes.kernels.streams.mix import mix_read_on, mix_write, mix_write_read
from axes.kernels.streams.sinkhorn import sinkhorn
from axes.kernels.substitution import chain as substitution_module
from axes.kernels.substitution import response as response_module
from axes.kernels.substitution.chain import Reads, Response, register, substitution_chain
from axes.optim import AdamW
from axes.routes import token
from axes.routes.substitution_kernel import Made, names_of, response_of
from axes.sequence import AdamNet, LatticeDec, Longhorn, YaadMatrix
from tests.hopper import Asked, Launch, asked, hopper

HALF, FULL = torch.bfloat16, torch.float32


def tokens(dtype: torch.dtype, d_k: int, d_v: int, length: int = 256) -> tuple[Tensor, ...]:
    q, k = (torch.randn(2, length, 2, d_k, dtype=dtype, requires_grad=True) for _ in range(2))
    v = torch.randn(2, length, 2, d_v, dtype=dtype, requires_grad=True)
    beta = torch.rand(2, length, 2, requires_grad=True)
    return q, k, v, beta, -beta.detach().requires_grad_()


def both(outputs: tuple[Tensor, ...]) -> None:
    """Forward has been launched: launch the backward."""
    sum(o.float().sum() for o in outputs).backward()  # type: ignore[union-attr]


def add_and_norm(stream: torch.dtype, out: torch.dtype) -> Callable[[], None]:
    def run() -> None:
        h, y = (torch.randn(64, 768, dtype=t, requires_grad=True) for t in (stream, out))
        both(add_norm(h, y, torch.ones(768, requires_grad=True), 1e-6, out))

    return run


def gated_network() -> None:
    both((gated(torch.randn(64, 4096, dtype=HALF, requires_grad=True)),))


def scaled(shape: tuple[int, ...]) -> Callable[[], None]:
    def run() -> None:
        x, by = torch.randn(2, 64, 4, 128, dtype=HALF), torch.randn(shape)
        scale(x, by)
        scale_backward(x, x, by, True, True)

    return run


def kept_apart(d: int, gate: bool) -> Callable[[], None]:
    return lambda: both(set_aside(torch.randn(2, 64, 4, d, dtype=HALF, requires_grad=True), gate)[:1])


def scalar(dtype: torch.dtype, d: int, plain: bool = False, **options: object) -> Callable[[], None]:
    def run() -> None:
        q, k, v, beta, g = tokens(dtype, d, d)
        fits = patch.object(hopper_write, "fits", lambda *_: plain)
        with patch.object(scalar_module, "_plain", lambda *_: plain), fits:
            both(scalar_chain(q, k, v, beta, g, **options))  # type: ignore[arg-type]

    return run


def read_over_mass(d: int) -> Callable[[], None]:
    def run() -> None:
        q, k, v, beta, g = tokens(HALF, d, d)
        start, norm = torch.randn(2, 2, d, d), torch.rand(2, 2, d, requires_grad=True)
        both(mean_chain(q, k, v, beta, g, start, norm, 1.0))

    return run


def several_writes(d: int) -> Callable[[], None]:
    def run() -> None:
        _, k, v, beta, g = tokens(HALF, d, d)
        q = torch.randn(2, 128, 2, d, dtype=HALF, requires_grad=True)
        with (
            patch.object(scalar_module, "_plain", lambda *_: True),
            patch.object(scalar_module, "reads_last", lambda *_: True),
        ):
            both(scalar_chain(q, k, v, beta, g, rule="delta"))

    return run


def two_strengths(d: int) -> Callable[[], None]:
    def run() -> None:
        q, k, v, beta, g = tokens(HALF, d, d)
        write = torch.rand(beta.shape, requires_grad=True)
        with (
            patch.object(scalar_module, "_plain", lambda *_: True),
            patch.object(scalar_module, "takes_two", lambda *_: True),
        ):
            both(scalar_chain(q, k, v, beta, g, rule="delta", write=write))

    return run


def mass(d: int, dtype: torch.dtype = HALF) -> Callable[[], None]:
    def run() -> None:
        q, k, v, beta, g = tokens(dtype, d, d)
        both(mass_chain(q, k, v, beta, g))

    return run


def diagonal(
    dtype: torch.dtype, d: int, rule: str, plain: bool = False, strong: bool = True, cuts: int = 1, few: bool = False,
    bonus: bool = False,
) -> Callable[[], None]:  # fmt: skip
    def run() -> None:
        q, k, v, beta, _ = tokens(dtype, d, d)
        g = (-torch.rand(2, 256, 2, d)).requires_grad_()
        more = {"a": k, "b": q} if rule == "dplr" else {}
        more |= {"bonus": torch.randn(2, d, requires_grad=True)} if bonus else {}
        cut = patch.object(hopper_diagonal, "segments_of", lambda *_: cuts)
        reads = patch.object(hopper_diagonal_delta, "fits", lambda *_: plain)
        heads = patch.object(diagonal_delta, "_FEWEST", 96 if few else 1)
        with patch.object(hopper_write, "fits", lambda *_: plain), cut, reads, heads:
            both(diagonal_chain(q, k, v, g, beta if strong and rule != "dplr" else None, rule=rule, **more))  # type: ignore[arg-type]

    return run


def block(dtype: torch.dtype, d: int, plain: bool = False) -> Callable[[], None]:
    def run() -> None:
        q, k, v, _, _ = tokens(dtype, d, d)
        coefficients = [torch.rand(2, 256, 2, *s, requires_grad=True) for s in ((2, 2), (2,), (2,))]
        with patch.object(hopper_block, "fits", lambda *_: plain):
            both(block_chain(q, k, v, *coefficients))

    return run


def delta_text() -> str:
    """The text of the delta rule's response."""
    return inspect.getsource(response_module).split("\n\n\n", 1)[1]


def substitution(
    dtype: torch.dtype, d: int, gates: int, reads: Reads = "before", plain: bool = False, mixes: bool = False,
    radial: bool = False,
) -> Callable[[], None]:  # fmt: skip
    """Of the delta rule. gates: none, of the state, of its rows; plain: serial passes in Gluon; mixes: as if rows met;
    radial: in lengths of errors alone."""

    def run() -> None:
        q, k, v, beta, g = tokens(dtype, d, d)
        text = delta_text()
        name = register(Response(text + "\n" * (mixes + radial), (True, False), mixes, radial=radial))
        if gates == 2:
            g = (-torch.rand(*v.shape)).requires_grad_()
        with patch.object(substitution_module, "serial_on_hopper", lambda *_: plain):
            out = substitution_chain(q, k, name, d, [v, beta], g if gates else None, reads=reads)
            both(tuple(out))

    return run


def owned(d: int) -> Callable[[], None]:
    """Passes that own rows and what they leave to others, of a clipped step: gates, rates, thresholds by rows."""

    def run() -> None:
        q, k, v, _, _ = tokens(HALF, d, d)
        made = response_of(YaadMatrix.update, d, d, names_of(YaadMatrix.update, {}))
        assert isinstance(made, Made)
        g = (-torch.rand(*v.shape)).requires_grad_()
        given = [v, *[torch.rand(*v.shape, requires_grad=True) for _ in made.inputs[1:]]]
        with patch.object(substitution_module, "anchored_on_hopper", lambda *_: True):
            both(tuple(substitution_chain(q, k, made.name, d, given, g, reads="anchored"))[:3])

    return run


def beside(d: int) -> Callable[[], None]:
    """Serial passes of an implicit step with rates by rows, which make the derivatives in these."""

    def run() -> None:
        q, k, v, _, _ = tokens(HALF, d, d)
        made = response_of(Longhorn.update, d, d, names_of(Longhorn.update, {}))
        assert isinstance(made, Made)
        rates = torch.rand(*v.shape, requires_grad=True)
        with patch.object(substitution_module, "serial_on_hopper", lambda *_: True):
            both(tuple(substitution_chain(q, k, made.name, d, [v, rates], None, reads="gated")))

    return run


def network(
    dtype: torch.dtype, d: int, rows: bool = False, held: bool = False, plain: bool = False
) -> Callable[[], None]:
    """The error of a memory of two layers. rows: gates and rates by rows; held: by a filter; plain: in Gluon."""

    def run() -> None:
        q, k, v, beta, g = tokens(dtype, d, d)
        text = delta_text()
        name = register(Response(text, (True, False), False))
        starts = [torch.randn(2, 2, *n, requires_grad=True) for n in ((d, 4 * d), (4 * d, d)) * (1 + held)]
        c, end = torch.rand(2, 256, 2, 16, requires_grad=True), torch.rand(2, 16, 2, 16, requires_grad=True)
        of_filter = (g, c, end[..., 0], end) if held else (None, c, None, None)
        of_rows = [(-torch.rand(*v.shape)).requires_grad_() for _ in range(2)] if rows else [None, None]
        terms = Terms(g if rows or held else None, *of_filter, *of_rows)
        pair = (starts[2], starts[3]) if held else None
        with patch.object(hopper_hold, "fits", lambda *_: plain):
            read = network_chain(q, k, name, [v, beta], terms, (starts[0], starts[1]), pair)
            both((read.o, *read.weights, *read.held, *read.before))

    return run


def entries(d_k: int, erase: Erase = "none", **rows: bool) -> Callable[[], None]:
    """rows: which of a row's numbers there are, and whether entries have a spectrum."""

    def run() -> None:
        q, k = (torch.randn(2, 256, 1, d_k, dtype=HALF, requires_grad=d_k > 1) for _ in range(2))
        v = torch.randn(2, 256, 1, 256, dtype=HALF, requires_grad=True)
        given = {n: torch.rand(*((1, 256, d_k) if n == "spectrum" else v.shape), requires_grad=True) for n in rows}
        both(entries_chain(q, k, v, given.pop("gate", None), **given, tied="times" in rows, erase=erase))

    return run


def modes(shared: bool = False) -> Callable[[], None]:
    def run() -> None:
        q, k = (torch.ones(2, 256, 1, 1, dtype=HALF, requires_grad=True) for _ in range(2))
        v = torch.randn(2, 256, 2, 128, dtype=HALF, requires_grad=True)
        lead = () if shared else (2, 256)
        gate, angle = (torch.rand(*lead, 2, 64, requires_grad=True) for _ in range(2))
        both(modes_chain(q, k, v, gate, angle))

    return run


def rows(
    d_k: int, d_v: int, dtype: torch.dtype = HALF, average: bool = False, plain: bool = False
) -> Callable[[], None]:
    def run() -> None:
        q, k = (torch.randn(2, 256, 2, d_k, dtype=dtype, requires_grad=True) for _ in range(2))
        v = torch.randn(2, 256, 2, d_v, dtype=dtype, requires_grad=True)
        g, start = (-torch.rand(2, 256, 2, d_v)).requires_grad_(), torch.randn(2, 2, d_v, d_k)
        with patch.object(hopper_write, "fits", lambda *_: plain):
            both(rows_chain(q, k, v, g, start, average=average))

    return run


def levels(d: int, dtype: torch.dtype = HALF) -> Callable[[], None]:
    def run() -> None:
        q, k, v = (torch.randn(2, 1000, 2, d, dtype=dtype, requires_grad=True) for _ in range(3))
        beta, g = torch.rand(2, 1000, 2, requires_grad=True), (-torch.rand(2, 1000, 2)).requires_grad_()
        both(levels_chain(q, k, v, beta, g, torch.rand(2, 1000, 2, 16, requires_grad=True)))

    return run


def levels_of_erasing(d: int, dtype: torch.dtype = HALF) -> Callable[[], None]:
    def run() -> None:
        q, k, a, v = (torch.randn(2, 300, 2, d, dtype=dtype, requires_grad=True) for _ in range(4))
        g, w = (-torch.rand(2, 300, 2)).requires_grad_(), torch.rand(2, 300, 2, 16, requires_grad=True)
        both((levels_inside(q, k, a, v, g, w),))

    return run


def cells(cell: str, d: int, dtype: torch.dtype = HALF, held: bool = False) -> Callable[[], None]:
    """held: matrices in registers."""

    def run() -> None:
        gates, carried = CELLS[cell][:2]
        x = torch.randn(20, 50, 2, gates, d, dtype=dtype, requires_grad=True)
        w, b = (torch.randn(2, *n, gates, d, requires_grad=True) for n in ((d,), ()))
        state = [torch.randn(20, 2, d, requires_grad=True) for _ in range(1 + carried)]
        with patch.object(recurrent_hold, "fits", lambda *_: held):
            out, y, carry = recurrent_chain(cell, x, w, b, state[0], tuple(state[1:]))
            both((out, y, *carry))

    return run


def matrix_cells(d_k: int, d_v: int, dtype: torch.dtype = HALF) -> Callable[[], None]:
    def run() -> None:
        q, k = (torch.randn(2, 50, 2, d_k, dtype=dtype, requires_grad=True) for _ in range(2))
        v = torch.randn(2, 50, 2, d_v, dtype=dtype, requires_grad=True)
        w, g = torch.randn(2, d_v, d_v, requires_grad=True), (-torch.rand(2, 50, 2)).requires_grad_()
        both(matrix_chain(q, k, v, g, w, torch.randn(2, 2, d_v, d_k, requires_grad=True)))

    return run


def attention(dtype: torch.dtype, d: int, masses: bool = True) -> Callable[[], None]:
    def run() -> None:
        q, k, v = (torch.randn(2, 256, 2, d, dtype=dtype, requires_grad=True) for _ in range(3))
        mass = torch.zeros(2, 256, 2, dtype=torch.float64, requires_grad=True) if masses else None
        attend(q, k, v, mass, scale=0.1).sum().backward()

    return run


def hopper_attention(d: int, masses: bool = True) -> Callable[[], None]:
    def run() -> None:
        with patch.object(attend_module, "_on_hopper", lambda *_: True):
            attention(HALF, d, masses)()

    return run


def carried() -> None:
    given = [torch.randn(2, 300, 2, 128, dtype=HALF, requires_grad=True) for _ in range(5)]
    transport(*given, torch.zeros(2, 300, 2, dtype=torch.float64, requires_grad=True), scale=0.1)[0].sum().backward()


def one_query() -> None:
    k, v = (torch.randn(2, 500, 2, 128, dtype=HALF) for _ in range(2))
    attend_one(torch.randn(2, 1, 8, 128, dtype=HALF), k, v, torch.zeros(2, 2, 500), 0.1)
    one = torch.randn(2, 8, 1, 128, dtype=HALF)
    carry_one(
        one, torch.randn(2, 8, 499, 128), one, torch.randn(2, 8, 500, 128, dtype=HALF), one, one,
        torch.zeros(2, 8, 500), scale=0.1,
    )  # fmt: skip


def turned() -> None:
    turn(*(torch.randn(2, 256, 2, 128, dtype=HALF) for _ in range(2)), torch.rand(256, 64))


def contained() -> None:
    q, k, v, beta, g = tokens(HALF, 128, 128)
    state, channels = torch.zeros(2, 2, 128, 128), -torch.rand(*q.shape)
    for rule, gate, a, b in (("delta", g, None, None), ("write", channels, None, None), ("dplr", channels, q, k)):
        contain_module.contain(v, state, q, k, v, beta, gate, state, None, 64, rule, a, b)
    for rule in ("write", "average"):
        contain_module.contain(v, state, q, k, v, None, channels, state, None, 64, rule, by_rows=True)
    contain_module.contain(v, state, q, k, v, None, channels, state, None, 64, "average")
    contain_module.contain(v, state, q, k, v, None, channels, state, None, 64, "write", bonus=torch.rand(2, 128))
    two = torch.zeros(2, 2, 128, 2, 128)
    contain_module.contain_two(v, two, q, k, v, torch.rand(*g.shape, 2, 2), *torch.rand(2, *g.shape, 2), two, None, 64)


def contained_attention() -> None:
    for dtype, d in ((HALF, 128), (HALF, 256), (FULL, 128)):
        q, k, v = (torch.randn(2, 256, h, d, dtype=dtype) for h in (4, 2, 2))
        for mass in (None, torch.zeros(2, 256, 2)):
            read_again(torch.empty_like(q), q, k, v, mass, mass, None, 0.1, 0)


def contained_walks_back() -> None:
    """Carried keys, and levels of chains that erase and that do not."""
    q, k, v, beta, g = tokens(HALF, 128, 128)
    contain_carried(torch.empty_like(v), q, k, v, k, k, g, g, 0.1, 64)
    w = torch.rand(2, 256, 2, 14)
    contain_levels(torch.empty_like(v), q, k, v, beta, g, None, w, 64, inside=False)
    contain_levels(torch.empty_like(v, dtype=FULL), q, k, v, None, g, k, w, 64, inside=True)


def contained_substitution(mixes: bool) -> Callable[[], None]:
    """The recurrence behind the chunks, beside them: of rows that do not meet, and as if they did."""

    def run() -> None:
        q, k, v, beta, _ = (x.detach() for x in tokens(HALF, 128, 128))
        text = inspect.getsource(response_module).split("\n\n\n", 1)[1] + "\n" * mixes
        name = register(Response(text, (True, False), mixes))
        with patch.object(contain_module, "PICKED", True):
            substitution_chain(q, k, name, 128, [v, beta], -torch.rand(*v.shape), reads="anchored")

    return run


def steps() -> None:
    q, k, v, beta, g = (x.detach()[:, 0] for x in tokens(HALF, 128, 128))
    chain_step(torch.zeros(2, 2, 128, 128), q, k, v, beta=beta, g=g, rule="delta")
    chain_step(torch.zeros(2, 2, 128, 128), q, k, v, g=g, turn=torch.rand(64))
    two = torch.zeros(2, 2, 128, 2, 128)
    block_step(two, q, k, v, torch.rand(2, 2, 2, 2), torch.rand(2, 2, 2), torch.rand(2, 2, 2))


def sums() -> None:
    outer_sum(torch.randn(1, 512, 256, dtype=HALF))


def symmetric(plain: bool) -> Callable[[], None]:
    """Every form: no, one and two terms; by columns; results and factors in float32; numbers for each matrix."""

    def run() -> None:
        x, full = torch.randn(2, 256, 512).half(), torch.randn(2, 256, 256)
        gram = full.half()
        fits = patch.object(hopper_symmetric, "fits", lambda _: plain)
        with fits, patch.object(hopper_symmetric, "_processors", lambda _: 132):
            symmetric_product(x)
            symmetric_product(gram, x[..., :256].contiguous(), terms=((0.5, gram),), diagonal=1.0)
            symmetric_product(gram, terms=((0.5, gram), (2.0, gram)))
            symmetric_product(x.mT.contiguous().mT, dtype=FULL, terms=((0.5, full),))
            if plain:
                symmetric_product(full, terms=((0.5, full),), factors=torch.ones(2, 2))

    return run


def halves(dtype: torch.dtype, d: int, packed: bool = False, turn: float = 0.0) -> Callable[[], None]:
    """Of the gated delta rule's block; turn: of its queries and keys."""

    def run() -> None:
        q = Stream(8, d, 4, False, "silu", "none", "unit", 1e-12, d**-0.5, turn)
        numbers = (Numbers(8, "ssm", biased=True), Numbers(8, "sigmoid"))
        plan = Plan((q, q._replace(scale=1.0), q._replace(norm="none", scale=1.0, turn=0.0)), numbers, 24 * d + 24)
        p = torch.randn(1, 512, plan.width, dtype=dtype, requires_grad=True)
        parameters = [torch.randn(n, dtype=dtype, requires_grad=True) for n in plan.parameters()]
        tails = [torch.randn(x, dtype=dtype, requires_grad=True) for x in plan.tails(2)] if packed else []
        outs, ends = enter(p, plan, parameters, tails, torch.tensor([0, 100, 512]).int() if packed else None)
        both((*outs, *(ends if packed else ())))
        y, g = (torch.randn(s, dtype=dtype, requires_grad=True) for s in ((1, 512, 2, d), (1, 512, 2 * d)))
        both((leave(y, g, torch.randn(d, dtype=dtype, requires_grad=True)),))

    return run


def time_mixing(dtype: torch.dtype, d: int, packed: bool = False) -> Callable[[], None]:
    """RWKV-7's: mixtures with the token before, removal keys, the way out with a bonus."""

    def run() -> None:
        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=dtype, requires_grad=True)

        cu = torch.tensor([0, 100, 512]).int() if packed else None
        weights = [draw(n, 256) for n in (2 * d, 2 * d, 32)]
        q, k, _ = mixed_products(draw(1, 512, 256), draw(3, 256), weights, draw(2, 1, 256) if packed else None, cu)
        q, k = (x.unflatten(-1, (2, d)) for x in (q, k))
        made = removal(k, draw(1, 512, 2 * d), *[draw(2 * d) for _ in range(3)])
        u = leave_bonus(draw(1, 512, 2, d), q, made[0], k, draw(1, 512, 2 * d), draw(2, d), draw(2 * d), draw(2 * d))
        both((u, *made))

    return run


def streams(dtype: torch.dtype, n: int, constant: bool = False) -> Callable[[], None]:
    """A read, a write that mixes, one that does not, and one with the next read."""

    def run() -> None:
        def draw(*shape: int, of: torch.dtype = FULL) -> Tensor:
            return torch.randn(*shape, dtype=of, requires_grad=True)

        lead = () if constant else (2, 64)
        x, y, m = draw(2, 64, n, 1024, of=dtype), draw(2, 64, 1024, of=dtype), draw(*lead, n, n)
        w, r = draw(*lead, n), draw(*lead, n)
        both(mix_read_on(x, r))
        both((mix_write(x, y, w, m),))
        both((mix_write(x, y, w),))
        if n == 4:
            both(mix_write_read(x, y, w, r, m))

    return run


def looks(
    dtype: torch.dtype, n: int, entries: int, chart: str, d: int = 1024, scales: int | None = None, **options: bool
) -> Callable[[], None]:  # fmt: skip
    """Predicted coefficients and the read with them."""

    def run() -> None:
        groups = n if chart == "first" else 1
        shapes = (entries, n * d // groups), (scales or entries,), (groups, entries)
        phi, a, b = (torch.randn(shape, requires_grad=True) for shape in shapes)
        x = torch.randn(2, 3000, n, d, dtype=dtype, requires_grad=True)
        both(look(x, phi, a, b, chart, **options))

    return run


def followed(
    dtype: torch.dtype, entries: int, chart: str, scales: int | None = None, **options: bool
) -> Callable[[], None]:  # fmt: skip
    """A write of four streams, and what the next sublayer predicts of what it wrote."""

    def run() -> None:
        n, d, groups = 4, 1024, 4 if chart == "first" else 1
        shapes = (entries, n * d // groups), (scales or entries,), (groups, entries)
        phi, a, b = (torch.randn(shape, requires_grad=True) for shape in shapes)
        x, y = (torch.randn(2, 3000, *s, d, dtype=dtype, requires_grad=True) for s in ((n,), ()))
        w, m = (torch.randn(2, 3000, *s, requires_grad=True) for s in ((n,), (n, n)))
        both(write_look(x, y, w, m, phi, a, b, chart, **options))

    return run


def doubly_stochastic() -> None:
    for n in (4, 3, 16):
        for eps in (0.0, 1e-6):
            both((sinkhorn(torch.randn(2, 600, n, n, requires_grad=True), 20, eps),))


def rotations() -> None:
    for n, centred in ((4, False), (4, True), (16, False)):
        both((cayley(torch.randn(2, 600, n, n, requires_grad=True), 0.1, centred),))


def iterations(m: int, n: int, polynomials: int) -> Callable[[], None]:
    def run() -> None:
        triples = tuple((2.0, -1.5, 0.1 * i) for i in range(polynomials))
        both((newton_schulz(torch.randn(600, m, n, requires_grad=True), triples, 8),))

    return run


def masses() -> None:
    for dtype, floor in ((HALF, 0.0), (FULL, 0.0), (HALF, 1.0)):
        y, mass = (torch.randn(2, 64, 2, n, dtype=dtype, requires_grad=True) for n in (128, 1))
        both((over_mass(y, mass, floor),))


def adamw(dtype: torch.dtype, **options: Any) -> Callable[[], None]:
    def run() -> None:
        parameters = [torch.nn.Parameter(torch.randn(n).to(dtype)) for n in (10_000, 77)]
        for p in parameters:
            p.grad = torch.randn_like(p)
        AdamW(parameters, fused=True, **options).step()

    return run


def token_by_token(update: StateUpdate, hopper: bool = False) -> Callable[[], None]:
    """Kernels generated from a step. hopper: those whose tiles lie over threads as they are told."""
    from axes.programs import tile_kernels

    def on(walk: tile_kernels.Walk, *_: object) -> tuple[tile_kernels.Walk, tile_kernels.Walk]:
        assert walk.hopper is not None
        return walk.hopper if hopper else (walk, walk)

    def run() -> None:
        with patch.object(tile_kernels, "_on", on):
            walked()

    def walked() -> None:
        q, k, v, beta, _ = tokens(HALF, 64, 64, length=100)
        rates = {rate.name: beta for rate in update.demands()}
        out, _ = token.run(update, {"q": q, "k": k, "v": v, **rates}, None, None)
        out.float().sum().backward()

    return run


CASES: dict[str, Callable[[], None]] = {
    "hopper 128": scalar(HALF, 128, plain=True, rule="delta"),
    "hopper 64": scalar(HALF, 64, plain=True, rule="delta"),
    "hopper segments": scalar(HALF, 128, plain=True, rule="delta", segments=2),
    "hopper two strengths 128": two_strengths(128),
    "hopper two strengths 64": two_strengths(64),
    "hopper two writes 128": several_writes(128),
    "hopper two writes 64": several_writes(64),
    "delta 128": scalar(HALF, 128, rule="delta"),
    "delta 256": scalar(HALF, 256, rule="delta"),
    "delta 64 float32": scalar(FULL, 64, rule="delta"),
    "delta segments": scalar(HALF, 128, rule="delta", segments=2),
    "hopper write 128": scalar(HALF, 128, plain=True, rule="write"),
    "hopper mean 128": read_over_mass(128),
    "hopper mean 64": read_over_mass(64),
    "hopper write 64": scalar(HALF, 64, plain=True, rule="write"),
    "write 128": scalar(HALF, 128, rule="write"),
    "mass 128": mass(128),
    "hopper diagonal 128": diagonal(HALF, 128, "write", plain=True, strong=False),
    "hopper diagonal 64": diagonal(HALF, 64, "write", plain=True, strong=False),
    "diagonal average 128": diagonal(HALF, 128, "average", plain=True, strong=False),
    "diagonal average 64": diagonal(HALF, 64, "average", plain=True, strong=False),
    "diagonal bonus 128": diagonal(HALF, 128, "write", plain=True, strong=False, bonus=True),
    "diagonal bonus 64": diagonal(HALF, 64, "write", plain=True, strong=False, bonus=True),
    "hopper diagonal segments": diagonal(HALF, 128, "write", plain=True, strong=False, cuts=2),
    "diagonal 128": diagonal(HALF, 128, "write"),
    "hopper diagonal delta 128": diagonal(HALF, 128, "delta", plain=True),
    "hopper diagonal delta 64": diagonal(HALF, 64, "delta", plain=True),
    "hopper diagonal delta few heads 128": diagonal(HALF, 128, "delta", plain=True, few=True),
    "diagonal delta 128": diagonal(HALF, 128, "delta"),
    "hopper dplr 128": diagonal(HALF, 128, "dplr", plain=True),
    "hopper dplr 64": diagonal(HALF, 64, "dplr", plain=True),
    "dplr 128": diagonal(HALF, 128, "dplr"),
    "hopper block 128": block(HALF, 128, plain=True),
    "hopper block 64": block(HALF, 64, plain=True),
    "block 128": block(HALF, 128),
    "substitution 128": substitution(HALF, 128, 0, "gated"),
    "hopper substitution 128": substitution(HALF, 128, 1, plain=True),
    "hopper substitution of rows that meet 128": substitution(HALF, 128, 1, plain=True, mixes=True),
    "hopper substitution of rates by rows 128": beside(128),
    "hopper substitution by lengths of errors 128": substitution(HALF, 128, 1, plain=True, mixes=True, radial=True),
    "substitution by rows 128": substitution(HALF, 128, 2),
    "hopper substitution anchored by rows 128": owned(128),
    "rows 128 x 64": rows(128, 64),
    "rows average 128 x 64": rows(128, 64, average=True),
    "hopper rows 128 x 64": rows(128, 64, average=True, plain=True),
    "hopper rows 64 x 128": rows(64, 128, plain=True),
    "levels 128": levels(128),
    "levels of erasing 128": levels_of_erasing(128),
    "levels 64": levels(64),
    "levels 20, float32": levels(20, FULL),
    "network in Gluon 64": network(HALF, 64, plain=True),
    "network in Gluon by rows 64": network(HALF, 64, rows=True, plain=True),
    "network in Gluon with a filter 64": network(HALF, 64, held=True, plain=True),
    "network by rows 64": network(HALF, 64, rows=True),
    "network with a filter 64": network(HALF, 64, held=True),
    "modes": modes(),
    "modes of all tokens": modes(shared=True),
    "network 128": network(HALF, 128),
    "entries of rows": entries(1, gate=True, beta=True),
    "entries 16": entries(16, times=True, spectrum=True),
    "entries erased 16": entries(16, "gated", beta=True),
    "entries implicit 16": entries(16, "new", beta=True, gate=True),
    "gru 128": cells("gru", 128),
    "gru 64": cells("gru", 64),
    "slstm 128": cells("slstm", 128),
    "gru 128 in registers": cells("gru", 128, held=True),
    "gru 16 in registers": cells("gru", 16, torch.float16, held=True),
    "slstm 128 in registers": cells("slstm", 128, held=True),
    "m2rnn 64": matrix_cells(64, 64),
    "m2rnn 16 float32": matrix_cells(64, 16, FULL),
    "attention 128": attention(HALF, 128),
    "attention 64": attention(HALF, 64),
    "attention 256": attention(HALF, 256),
    "plain attention 128": attention(HALF, 128, masses=False),
    "attention 64 float32": attention(FULL, 64),
    "hopper attention 128": hopper_attention(128),
    "hopper attention 64": hopper_attention(64),
    "hopper plain attention 128": hopper_attention(128, masses=False),
    "carried keys": carried,
    "one query": one_query,
    "turn": turned,
    "step": steps,
    "contain": contained,
    "contain attention": contained_attention,
    "contain walks back": contained_walks_back,
    "contain substitution": contained_substitution(False),
    "contain substitution of rows that meet": contained_substitution(True),
    "token lattice-dec": token_by_token(LatticeDec.update),
    "token adam-net": token_by_token(AdamNet.update),
    "token lattice-dec, told": token_by_token(LatticeDec.update, hopper=True),
    "token adam-net, told": token_by_token(AdamNet.update, hopper=True),
    "outer": sums,
    "block halves 128": halves(HALF, 128),
    "block halves 128 float32": halves(FULL, 128),
    "block halves packed": halves(HALF, 64, packed=True),
    "block halves turned": halves(HALF, 128, turn=10000.0),
    "time mixing 128": time_mixing(HALF, 128),
    "time mixing 64 float32": time_mixing(FULL, 64),
    "time mixing packed": time_mixing(HALF, 64, packed=True),
    "hopper symmetric": symmetric(plain=True),
    "symmetric": symmetric(plain=False),
    "streams 4": streams(HALF, 4),
    "streams 4 float32": streams(FULL, 4),
    "streams 4 constant": streams(HALF, 4, constant=True),
    "streams 16": streams(HALF, 16),
    "look 4": looks(HALF, 4, 24, "sigmoid"),
    "look 4 float32": looks(FULL, 4, 24, "sigmoid"),
    "look 4 half": looks(torch.float16, 4, 24, "sigmoid"),
    "look 4 writes": looks(HALF, 4, 24, "sigmoid", scales=3, writes=True),
    "look 4 softmax": looks(HALF, 4, 48, "softmax", scales=1, centred=True, writes=True),
    "look 4 each": looks(HALF, 4, 6, "first", tanh=True),
    "follow 4": followed(HALF, 24, "sigmoid"),
    "follow 4 float32": followed(FULL, 24, "sigmoid"),
    "follow 4 writes": followed(HALF, 24, "sigmoid", scales=3, writes=True),
    "follow 4 softmax": followed(HALF, 48, "softmax", scales=1, centred=True, writes=True),
    "follow 4 each": followed(HALF, 6, "first", tanh=True),
    "look 10": looks(HALF, 10, 120, "sigmoid"),
    "sinkhorn": doubly_stochastic,
    "cayley": rotations,
    "iterations 32": iterations(32, 32, 1),
    "iterations 16": iterations(16, 16, 8),
    "iterations 20 x 7": iterations(20, 7, 1),
    "over mass": masses,
    "adamw": adamw(FULL),
    "adamw 24 bit, 8 bit": adamw(HALF, master="24bit", moments="8bit"),
    "adamw at random": adamw(HALF, rounding="stochastic"),
    "add and norm": add_and_norm(FULL, HALF),
    "add and norm in 16 bits": add_and_norm(HALF, HALF),
    "gated network": gated_network,
    "scaled vectors": scaled((2, 64, 4, 1)),
    "scaled entries": scaled((2, 64, 4, 128)),
    "set aside": kept_apart(128, False),
    "set aside, gates": kept_apart(1, True),
}

# ---- one kernel at several sizes -------------------------------------------------------------------------------------
# What ran on a full chip is what runs anywhere: ptxas mixes up registers of copies and products in ways that differ by
# binary.


def delta_sizes() -> Iterator[None]:
    for batch, length, heads, segments in ((1, 64, 1, 1), (2, 100, 3, 1), (1, 256, 16, 2)):
        q, k, v = torch.randn(3, batch, length, heads, 64, dtype=torch.bfloat16).requires_grad_().unbind()
        beta, g = torch.rand(2, batch, length, heads).unbind()
        start = torch.randn(batch, heads, 64, 64)
        with patch.object(scalar_module, "_plain", lambda *_: True):
            scalar_chain(q, k, v, beta, g, initial_state=start, segments=segments)[0].sum().backward()
        yield


def _two_sizes(rule: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Iterator[None]:
    for batch, length, heads, value_heads in ((2, 100, 3, 6), (3, 260, 2, 4)):  # two value heads for one
        q, k = torch.randn(2, batch, length, heads, 128, dtype=torch.bfloat16).requires_grad_().unbind()
        v = torch.randn(batch, length, value_heads, 128, dtype=torch.bfloat16).requires_grad_()
        fits = patch.object(hopper_write, "fits", lambda *_: True)
        with fits, patch.object(hopper_diagonal, "segments_of", lambda *_: 2):
            both(rule(q, k, v, torch.randn(batch, value_heads, 128, 128)))
        yield


def write_sizes() -> Iterator[None]:
    def rule(q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        beta, g = torch.rand(2, *v.shape[:3]).requires_grad_().unbind()
        return scalar_chain(q, k, v, beta, g, initial_state=start, rule="write", segments=2)

    return _two_sizes(rule)


def diagonal_sizes() -> Iterator[None]:
    def rule(q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        g = (-torch.rand(*v.shape[:3], q.shape[3])).requires_grad_()
        return diagonal_chain(q, k, v, g, initial_state=start)

    return _two_sizes(rule)


SIZES = {"sizes of delta": delta_sizes, "sizes of write": write_sizes, "sizes of diagonal": diagonal_sizes}

# ---- faults ----------------------------------------------------------------------------------------------------------


def overwritten() -> None:
    """The launch that gave other bits at every run on a full chip."""
    with patch.dict(block_module._LAUNCH, {"gradients": ((64, 64, 8, 2),) * 3}):
        block(HALF, 128)()


@Kernel
@gluon.jit
def _forgets(to):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ended = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    for place in gl.static_range(2):
        mbarrier.init(ended.index(place), count=1)
        mbarrier.arrive(ended.index(place), count=1)
    mbarrier.arrive(bar, count=1)
    mbarrier.wait(bar, 0)
    retire(ended)
    gl.store(to, 1.0)


def forgotten() -> None:
    """A barrier that is not invalidated beside one that is."""
    _forgets[(1,)](torch.zeros(4), num_warps=4)


FAULTS = {"an operand overwritten": overwritten, "a barrier forgotten": forgotten}


# ---- what compiles them ----------------------------------------------------------------------------------------------


def launches(name: str) -> list[Launch]:
    """What a case launches, compiled."""
    with hopper("gradients" if name == "an operand overwritten" else None) as found, _ONCE:
        (CASES | FAULTS)[name]()
    return found


def requests(name: str) -> list[list[Asked]]:
    """What a case asks of the compiler, one list for every size."""
    made: list[list[Asked]] = []
    with asked() as found, _ONCE:
        for _ in SIZES[name]() if name in SIZES else [(CASES | FAULTS)[name]()]:
            made.append(found.copy())
            found.clear()
    return made


_ONCE = patch.object(contain_module, "PICKED", False)  # behind chains it is what its own case launches
