"""Reading rules under a gate per channel in Triton, exact chunk by chunk: the delta rule (KDA) and RWKV-7's rule.

    delta:  S_t = S_{t-1} Diag(e^{g_t}) + beta_t (v_t - S' a_t) k_t^T      S' = S_{t-1} Diag(e^{g_t}); early: S_{t-1}
    dplr:   S_t = S_{t-1} (Diag(e^{g_t}) + a_t b_t^T) + v_t k_t^T          o_t = S_t q_t

In a chunk of C tokens with first state X (as K x V), G the inclusive and E the exclusive cumulative log gates of each
channel, R = G for a reader after the gate and E for one before it, lower matrices sum over channels d
    A_xy[i, j] = sum_d x_id y_jd exp(R_id - G_jd)   i > j         P_y[i, j] = sum_d q_id y_jd exp(G_id - G_jd)   i >= j
    delta:  u = (I + beta A_ak)^-1 [beta (V - (a e^R) X)]         one writer k of u
    dplr:   u = (I - A_ab)^-1 [(a e^E) X + A_ak V]                two writers, b of u and k of V
    o = (q e^G) X + P u (+ P_k V)       X' = e^G_last X + sum over writers (y e^(G_last - G))^T u
and backwards, from do and dX', with M the inverse:
    r = M^T [P^T do + (y e^(G_last - G)) dX']           dX = e^G_last dX' + (q e^G)^T do -+ (a e^R)^T (beta) r
    dA = -+ strict(r u^T),  dP = lower(do u^T),         delta: dbeta = r . (v + a's gradient without beta)
A gate's gradient is the reverse cumulated sum of x dx over readers less y dy over writers, channel by channel, and
<X', dX'> at the chunk's end: no division, no atomics, one order of sums.

Where no channel of a chunk falls by more than e^-80 (float16: e^-6), exp(R_i - G_j) = exp(R_i) exp(-G_j), one matrix
product; other chunks are left to kernels of their own, exact for any gates (channels.py).
Forward: `prepare` over all chunks (scaled vectors, pair matrices), `solve` (M), and one kernel serial in time, which
needs no gates any more. Backward: the scaled vectors and states again, the serial reverse pass, then over all chunks
the gradients of pairs and of tokens. On Hopper `hopper` has serial passes of plain shapes, `hopper_keys` those of
many heads whose reader is the key, without scaled vectors in memory, `hopper_tokens` the gradients of mild chunks;
those of dplr are in `hopper_dplr`, and what its mild chunks are before their state is known in `hopper_dplr_pairs`.
The scaled vectors live only as long as a call: written, they cost the serial pass what cumulative gates would.
"""

from __future__ import annotations

import torch
from torch import Tensor

from axes.kernels import contain
from axes.kernels.common import inverse
from axes.kernels.common.layout import Layout, extent, layout, on_device
from axes.kernels.common.operators import Differentiable
from axes.kernels.common.sizes import cdiv, power_of_2
from axes.kernels.common.tiles import TILE
from axes.kernels.common.versions import gluon_refusal
from axes.kernels.diagonal.channels import exponents, sums
from axes.kernels.diagonal_delta import pairs, passes
from axes.kernels.diagonal_delta.gradients import gradients
from axes.kernels.scalar.sizes import form, products

if _GLUON := gluon_refusal() is None:  # on an unknown Triton these modules raise, and the portable kernels run
    from axes.kernels.diagonal_delta import hopper, hopper_keys
    from axes.kernels.diagonal_delta.hopper_dplr import dplr_backward
    from axes.kernels.diagonal_delta.hopper_dplr_pairs import dplr_prepare
    from axes.kernels.diagonal_delta.hopper_tokens import tokens_backward

_FEWEST = 96  # heads of all sequences: a pass that scales takes its time over a chunk, however few it has
_LOOK, _PROGRAMS = 4, 1024  # chunks that a program for closed gates looks at, and its programs while that is enough

# ---- launches ------------------------------------------------------------------------------------------------------


def _chunk(q: Tensor) -> int:
    """Tokens of a chunk."""
    return 16 if q.dtype == torch.float32 else 64


def _products(q: Tensor) -> str:
    return products(q.dtype, q.shape[3])


def _sizes(q: Tensor, v: Tensor, kernel: str) -> dict[str, int]:
    """Block sides. Products of warpgroups: values go by 64 whatever V is; smaller blocks have met compiler faults."""
    d_k, d_v = (power_of_2(x.shape[-1]) for x in (q, v))
    if form(q.dtype, q.shape[-1]) == "pieces" and kernel != "gradients":
        if kernel == "prepare":
            return {"BK": max(TILE, min(d_k, 32)), "BV": TILE}
        return {"BK": max(TILE, d_k), "BV": 64 if d_k >= 64 else max(TILE, min(d_v, 32))}
    if q.dtype == torch.float32:
        wide = max(TILE, d_k) if kernel == "serial" else max(TILE, min(d_k, 64))
        return {"BK": wide, "BV": max(TILE, min(d_v, 32))}
    return {"BK": max(64, d_k) if kernel == "serial" else 64, "BV": 64}


def _looks(count: int) -> tuple[int]:
    """Programs for chunks with closed gates: one each while there are few chunks, then up to _LOOK chunks each."""
    return (max(min(count, _PROGRAMS), cdiv(count, _LOOK)),)


def _launch(q: Tensor, kernel: str, two: bool) -> dict[str, int]:
    """Warps and pipeline stages: the only ones that were tested.

    Gradients have one stage: in Triton 3.6 a tile of a pipelined loop that is an operand and is used in registers too
    has one buffer, which the next copy overwrites while products still read it.
    """
    if q.dtype == torch.float32:
        warps = {"gradients": 8, "solve": 1}
        if form(q.dtype, q.shape[-1]) == "pieces":  # a product of 16 x 16 is one warp's; 8 hold a state of 128 keys
            serial = 8 if q.shape[-1] > 64 else 4
            warps |= {"prepare": 2 if two else 1, "scale": 1, "scan": serial, "states": serial, "reverse": serial}
        return {"num_warps": warps.get(kernel, 4), "num_stages": 1}
    if kernel == "solve":  # rows of a block in the registers of one warp
        return {"num_warps": 1, "num_stages": 1}
    if kernel in ("prepare", "scale", "gradients"):
        return {"num_warps": 4, "num_stages": 2 if kernel == "prepare" else 1}
    if q.shape[-1] > 128:
        return {"num_warps": 8, "num_stages": 1}
    return {"num_warps": 4, "num_stages": 1 if two or kernel == "reverse" else 2}


def _exponents(q: Tensor, g: Tensor) -> dict[str, int | float]:
    """channels.exponents, whose bound holds on both sides of a block's middle: FLAT; from one side it is twice that."""
    found = exponents(q, g)
    return {"PARTS": found["PARTS"], "BOUND": 2 * found["BOUND"], "FLAT": found["BOUND"]}


def _plain(cuts: Layout, q: Tensor, v: Tensor) -> bool:
    """Whether kernels for Hopper take these tokens."""
    return not cuts.packed and _GLUON and hopper.fits(q, v)


def _by_pairs(cuts: Layout, q: Tensor, v: Tensor) -> bool:
    """Whether dplr's chunks and their gradients are made by kernels for Hopper."""
    return q.shape[2] == v.shape[2] and _plain(cuts, q, v)


def _matrices(q: Tensor, v: Tensor, cuts: Layout, count: int) -> list[Tensor]:
    return [q.new_empty(cuts.slots, v.shape[2], cuts.chunk, cuts.chunk) for _ in range(count)]


def _run_prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, x: Tensor | None, y: Tensor, two: bool, early: bool,
    cuts: Layout, matrices: list[Tensor] | None,
) -> list[Tensor]:  # fmt: skip
    """The scaled q, a and writers, totals G_last, the least of each block; fills M, P (A_ak, P_k) where given."""
    h, hv, d = q.shape[2], v.shape[2], q.shape[3]
    scaled = [q.new_empty(*q.shape[:2], hv, d) for _ in range(4 if two else 3)]
    block = _sizes(q, v, "prepare")["BK"]
    totals = g.new_empty(cuts.slots, hv, d, dtype=torch.float32)
    falls = g.new_empty(cuts.slots, hv, cdiv(d, block), dtype=torch.float32)
    m, *inner = [scaled[0]] * 4 if matrices is None else matrices * (1 if two else 2)
    lowers = totals if matrices is None else torch.empty_like(m, dtype=torch.float32)
    grid = (cuts.slots * hv,)
    if grid[0] > 0 and q.shape[1] > 0:
        inputs = (q, k if x is None else x, y if two else k, k, k if two else y, g, lowers, *inner)
        where = (cuts.offsets, cuts.units_of_slots, cuts.length, cuts.chunks)
        shape = dict(
            H=h, HV=hv, K=d, C=cuts.chunk, BK=block, TWO=two, LATE=not (two or early), SHARED=x is None,
            PACKED=cuts.packed, PRECISION=_products(q), **_launch(q, "scale" if matrices is None else "prepare", two),
        )  # fmt: skip
        constants = _exponents(q, g)
        flat = constants.pop("FLAT")
        if two and x is not None and matrices is not None and _by_pairs(cuts, q, v):
            solved = float(constants["BOUND"])
            dplr_prepare(q, k, g, x, y, scaled, totals, falls, [m, *inner], solved)
        else:
            solved = 0.0
            pairs.prepare[(grid[0] * (1 if matrices is not None else cdiv(d, block)),)](
                *inputs,
                *scaled[:3],
                scaled[-1],
                totals,
                falls,
                *where,
                MATRICES=matrices is not None,
                **constants,
                **shape,
            )
        if matrices is not None:
            pairs.prepare_closed[_looks(grid[0])](
                *inputs, falls, *where, chunks=grid[0], LOOK=_LOOK, FLAT=flat, **constants, **shape
            )
            launch = _launch(q, "solve", two)
            pairs.solve[grid](
                lowers, m, falls, *where, HV=hv, K=d, C=cuts.chunk, BK=block, CLOSED=solved, PACKED=cuts.packed,
                **inverse.constants(q.dtype, cuts.chunk, launch["num_warps"]), **launch,
            )  # fmt: skip
    return [*scaled[:3], scaled[-1], totals, falls]


def _by_keys(q: Tensor, v: Tensor, x: Tensor | None, two: bool, cuts: Layout) -> bool:
    """Whether passes make scaled vectors themselves: it pays where they fill the processors."""
    many = x is None and q.shape[2] == v.shape[2] and q.shape[0] * q.shape[2] >= _FEWEST
    return many and not two and q.shape[1] > 0 and _plain(cuts, q, v)


def _run_inverses(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, early: bool, cuts: Layout, matrices: list[Tensor]
) -> Tensor:
    """M of every chunk, and P of those that are not mild: what the passes of `hopper_keys` are given. Returns falls."""
    h, d = k.shape[2:]
    m, p = matrices
    falls = g.new_empty(cuts.slots, h, cdiv(d, 64), dtype=torch.float32)
    lowers = torch.empty_like(m, dtype=torch.float32)
    constants = _exponents(q, g)
    hopper_keys.inverses(k, g, beta, m, falls, not early, float(constants["BOUND"]))
    flat, bound = constants.pop("FLAT"), constants["BOUND"]
    where = (cuts.offsets, cuts.units_of_slots, cuts.length, cuts.chunks)
    pairs.prepare_closed[_looks(cuts.slots * h)](
        q, k, k, k, beta, g, lowers, p, m, p, falls, *where, chunks=cuts.slots * h, LOOK=_LOOK, H=h, HV=h, K=d, C=64,
        BK=64, TWO=False, LATE=not early, SHARED=True, PACKED=False, PRECISION=_products(q), FLAT=flat, **constants,
        **_launch(q, "prepare", False),
    )  # fmt: skip
    launch = _launch(q, "solve", False)
    pairs.solve[(cuts.slots * h,)](
        lowers, m, falls, *where, HV=h, K=d, C=64, BK=64, CLOSED=float(bound), PACKED=False,
        **inverse.constants(q.dtype, 64, launch["num_warps"]), **launch,
    )  # fmt: skip
    return falls


def _run_outputs(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, x: Tensor | None, y: Tensor, start: Tensor | None, two: bool,
    early: bool, cuts: Layout, matrices: list[Tensor], o: Tensor, final: Tensor, record: bool,
) -> None:  # fmt: skip
    """Write o, final and the matrices of chunks."""
    if _by_keys(q, v, x, two, cuts):
        falls = _run_inverses(q, k, v, g, y, early, cuts, matrices)
        hopper_keys.chain(
            "o", q, k, v, g, y, matrices, falls, start, final, o, not early, float(_exponents(q, g)["BOUND"]),
            keep=record,
        )  # fmt: skip
        return
    *scaled, totals, _ = _run_prepare(q, k, v, g, x, y, two, early, cuts, matrices)
    hv, d, d_v, sizes = v.shape[2], q.shape[3], v.shape[3], _sizes(q, v, "serial")
    grid = cuts.units * hv * cdiv(d_v, sizes["BV"])
    if grid and _plain(cuts, q, v):
        hopper.walk(scaled, v, None if two else y, matrices, totals, start, final, o)
    elif grid:
        passes.scan[(grid,)](
            *scaled, v, v if two else y, *(matrices * (1 if two else 2)), totals, final if start is None else start,
            o, final, o, o, cuts.offsets, cuts.length, cuts.chunks,
            HV=hv, K=d, V=d_v, C=cuts.chunk, **sizes, TWO=two, STARTED=start is not None, RECORD=False,
            PACKED=cuts.packed, PRECISION=_products(q), **_launch(q, "scan", two),
        )  # fmt: skip


# ---- operator ------------------------------------------------------------------------------------------------------


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, x: Tensor | None, y: Tensor, start: Tensor | None,
    cu_seqlens: Tensor | None, two: bool, early: bool, record: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """o, final, and M, P (A_ak, P_k) of every chunk. x: a, or None where it is k; y: beta (B, T, HV), or with `two` b
    (B, T, H, K)."""
    cuts = layout(q.shape[0], q.shape[1], _chunk(q), cu_seqlens)
    hv, d, d_v = v.shape[2], q.shape[3], v.shape[3]
    o, final = torch.empty_like(v), q.new_empty(cuts.units, hv, d_v, d, dtype=torch.float32)
    matrices = _matrices(q, v, cuts, 4 if two else 2)
    with on_device(q):
        _run_outputs(q, k, v, g, x, y, start, two, early, cuts, matrices, o, final, record)
        if contain.PICKED:
            beta, b, rule = (None, y, "dplr") if two else (y, None, "delta")
            contain.contain(o, final, q, k, v, beta, g, start, cuts.offsets, cuts.chunk, rule, x, b, early)
    return o, final, matrices if record else []


def _shapes(q, k, v, g, x, y, start, cu_seqlens, two, early, record):
    c, (hv, d_v) = _chunk(q), v.shape[2:]
    units, slots = extent(q.shape[0], q.shape[1], c, cu_seqlens)
    matrices = [q.new_empty(slots, hv, c, c) for _ in range(record * (4 if two else 2))]
    return torch.empty_like(v), q.new_empty(units, hv, d_v, q.shape[3], dtype=torch.float32), matrices


def _backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, x: Tensor | None, y: Tensor, start: Tensor | None,
    cu_seqlens: Tensor | None, two: bool, early: bool, matrices: list[Tensor], do: Tensor, dfinal: Tensor,
) -> list[Tensor]:  # fmt: skip
    cuts = layout(q.shape[0], q.shape[1], _chunk(q), cu_seqlens)
    h, hv, d, d_v = q.shape[2], v.shape[2], q.shape[3], v.shape[3]
    dot, late, constants = _products(q), not (two or early), _exponents(q, g)
    states = q.new_empty(cuts.slots, hv, d_v, d)
    dstates, written, dwritten = torch.empty_like(states), torch.empty_like(v), torch.empty_like(v)
    dv, dg, dstart = torch.empty_like(v), torch.empty_like(g), torch.empty_like(dfinal)
    # a value head's share of a shared key head's gradients: float32, added below
    wide = q.new_empty(*q.shape[:2], hv, d, dtype=torch.float32 if hv > h else q.dtype)
    dq, dk = wide, torch.empty_like(wide)
    dx = dk if x is None else torch.empty_like(wide)
    dy = torch.empty_like(wide) if two else dk
    parts = cdiv(d, _sizes(q, v, "gradients")["BK"])
    dbeta = g.new_empty((0,) if two else (parts, *v.shape[:3]), dtype=torch.float32)
    with on_device(q):
        beta = v if two else y
        square = matrices * (1 if two else 2)
        serial = _sizes(q, v, "serial")
        shape = dict(HV=hv, K=d, V=d_v, C=cuts.chunk, TWO=two, PACKED=cuts.packed, PRECISION=dot)
        grid = cuts.units * hv * cdiv(d_v, serial["BV"])
        plain = _plain(cuts, q, v)
        fast = plain and h == hv and (_by_pairs(cuts, q, v) if two else x is None)
        by_keys = _by_keys(q, v, x, two, cuts)
        if by_keys:
            totals = g.new_empty(cuts.slots, hv, d, dtype=torch.float32)
            falls = g.new_empty(cuts.slots, hv, cdiv(d, 64), dtype=torch.float32)
            mild = float(constants["BOUND"])
            hopper_keys.chain(
                "states", q, k, v, g, y, matrices, falls, start, dfinal, written, late, mild, totals=totals,
                states=states,
            )  # fmt: skip
            hopper_keys.chain(
                "dv", q, k, do, g, y, matrices, falls, dfinal, dstart, dwritten, late, mild, dv=dv, states=dstates
            )
        else:
            *scaled, totals, falls = _run_prepare(q, k, v, g, x, y, two, early, cuts, None)
        if plain and not by_keys:
            strength = None if two else y
            hopper.walk(scaled, v, strength, matrices, totals, start, dfinal, written, states=states, record=True)
            hopper.walk(scaled, do, strength, matrices, totals, dfinal, dstart, dwritten, dv=dv, states=dstates)
        elif grid and not by_keys:
            passes.scan[(grid,)](
                *scaled, v, beta, *square, totals, dfinal if start is None else start, v, dfinal, states, written,
                cuts.offsets, cuts.length, cuts.chunks, **serial, STARTED=start is not None, RECORD=True, **shape,
                **_launch(q, "states", two),
            )  # fmt: skip
            passes.reverse[(grid,)](
                *scaled, beta, *square, totals, do, dfinal, dstates, dwritten, dv, dstart,
                cuts.offsets, cuts.length, cuts.chunks, **serial, **shape, **_launch(q, "reverse", two),
            )  # fmt: skip
        if cuts.slots * hv > 0 and q.shape[1] > 0:
            if fast and two:
                assert x is not None
                dplr_backward(
                    q, k, v, g, x, y, totals, do, states, dstates, written, dwritten, dq, dk, dx, dy, dg,
                    float(constants["BOUND"]),
                )  # fmt: skip
            elif fast:
                tokens_backward(
                    q, k, v, g, y, totals, do, states, dstates, written, dwritten, dq, dk, dbeta, dg, late,
                    float(constants["BOUND"]),
                )  # fmt: skip
            chunks = cuts.slots * hv
            for is_open in (False,) if fast else (True, False):
                gradients[(chunks * parts,) if is_open else _looks(chunks * parts)](
                    q, k if x is None else x, y if two else k, k, v, beta, g, totals, falls, do, states, dstates,
                    written, dwritten, dq, dx, dy, dk, dbeta, dg, cuts.offsets, cuts.units_of_slots,
                    v.shape[0] * v.shape[1], cuts.length, cuts.chunks, chunks=chunks, LOOK=_LOOK, **shape,
                    **_sizes(q, v, "gradients"),
                    FALL=_sizes(q, v, "prepare")["BK"], H=h, LATE=late, SHARED=x is None, OPEN=is_open, **constants,
                    SUMS=sums(constants["PARTS"]), **_launch(q, "gradients", two),
                )  # fmt: skip

    def grouped(grad: Tensor) -> Tensor:
        return grad if h == hv else grad.view(*q.shape[:2], h, hv // h, d).sum(3).to(q.dtype)

    last = grouped(dy) if two else dbeta.sum(0)
    return [grouped(dq), grouped(dk), dv, dg, dx if x is None else grouped(dx), last, dstart]


_chain = Differentiable("diagonal_delta", _forward, _backward, _shapes, gradients=7)


# ---- entries -------------------------------------------------------------------------------------------------------


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    erase: Tensor | None = None,
    early: bool = False,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} Diag(e^{g_t}) + beta_t (v_t - S' a_t) k_t^T, o_t = S_t q_t; the caller has checked the shapes.

    a is k or `erase`, like k; S' = S_{t-1} Diag(e^{g_t}), with `early` S_{t-1}. q, k (B, T, H, K), v (B, T, HV, V),
    g (B, T, HV, K) <= 0, beta (B, T, HV), initial_state (U, HV, V, K). Returns o like v and the last state, float32.
    """
    o, final = _chain(
        q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous(),
        None if erase is None else erase.to(q.dtype).contiguous(), beta.float().contiguous(),
        None if initial_state is None else initial_state.float().contiguous(), cu_seqlens, False, early,
    )  # fmt: skip
    return o, final


def dplr(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} (Diag(e^{g_t}) + a_t b_t^T) + v_t k_t^T, o_t = S_t q_t; the caller has checked the shapes.

    q, k, a, b (B, T, H, K), v (B, T, HV, V), g (B, T, HV, K) <= 0, initial_state (U, HV, V, K).
    Returns o like v and the last state, float32.
    """
    o, final = _chain(
        q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous(),
        a.to(q.dtype).contiguous(), b.to(q.dtype).contiguous(),
        None if initial_state is None else initial_state.float().contiguous(), cu_seqlens, True, False,
    )  # fmt: skip
    return o, final
