"""Device side of `enter`: from rows of one product P (tokens, W) to the vectors and rates of every head, and back.

A *part* is columns of P with one fate. A stream is (heads, D) columns:

    z_t = sum_j w_j x_{t-j} + b      a causal convolution of every channel; before its sequence a token is in the tail
    c_t = map(activation(z_t))
    n_t = scale c_t rsqrt(|c_t|^2 + eps)          over a head, or mean c_t^2 in the place of |c_t|^2, or neither
    o_t = n_t R(-t angle)                         pairs (j, j + D/2) of a head turn back, or not

and everything else is numbers, o = factor chart(x + b) entry by entry, in float32. A program takes some heads of a
stream, or columns of numbers, and a chunk of L tokens of a unit, and walks over its tokens one after another with what
a convolution sees in registers: every number is read once, four rows ahead of its use. Streams that differ in norm and
scale alone are members of one part and share its code, which is most of what there is to compile.

Backwards all of it is computed again from P. With y = c rsqrt(..), n = D or 1, and do turned forward,
    dc = scale rsqrt(..) (do - y (y . do) / n),   dz = dc map' activation',   dx_s = sum_j w_j dz_{s+j},
    dw_j = sum_t dz_t x_{t-j},                    db = sum_t dz_t:
a program goes conv - 1 tokens past its chunk, whose dz it needs too, and leaves its sums of dw and db to be added up.
The gradient of a tail is dx of tokens before the first one; that of the new tail goes to the last tokens' dx.
"""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.blocks.functions import NOTHING, SSM, activate, chart, chart_slope, slope
from axes.kernels.common.launch import Kernel
from axes.kernels.common.tiles import first_slot, slot_rows, unit_rows

STREAM = tl.constexpr(0)  # the kind of a part; 1: numbers
UNIT = tl.constexpr(1)  # norms: none, |c|^2, mean c^2
FIRST_OF, SCALE_OF, NORMED_OF, SUMS_OF = (tl.constexpr(i) for i in range(4))  # numbers of a stream


# ---- streams ---------------------------------------------------------------------------------------------------------


@triton.jit
def _of(pointers, member):
    """The member's own."""
    x = pointers[0]
    for m in tl.static_range(1, len(pointers)):
        x = tl.where(member == m, pointers[m], x)
    return x


@triton.jit
def _number(PARTS: tl.constexpr, I: tl.constexpr, KIND: tl.constexpr, member):
    """The member's number of this kind: those of a kind stand side by side at the end of a part."""
    PART: tl.constexpr = PARTS[I]
    MEMBERS: tl.constexpr = PART[15]
    x = PART[16 + KIND * MEMBERS]
    for m in tl.static_range(1, MEMBERS):
        x = tl.where(member == m, PART[16 + KIND * MEMBERS + m], x)
    return x


@triton.jit
def _place(block, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HB: tl.constexpr, PAIRS: tl.constexpr):
    """A program's channels (HB, DP) of a stream, and which of them there are; of PAIRS, in each half of a tile one."""
    head = block * HB + tl.arange(0, HB)
    column = tl.arange(0, DP)
    here = column < D
    if PAIRS and D != DP:
        here = column % (DP // 2) < D // 2
        column = column // (DP // 2) * (D // 2) + column % (DP // 2)
    held = tl.full([HB, DP], True, tl.int1)
    if HEADS % HB != 0 or D != DP:
        held = (head < HEADS)[:, None] & here[None, :]
    return head[:, None] * D + column[None, :], held


@triton.jit
def _angles(tokens, D: tl.constexpr, DP: tl.constexpr, TURN: tl.constexpr, UNIFORM: tl.constexpr):
    """Cosine and sine (1, DP / 2) of what pairs turn in so many tokens: float32 would lose the angle of many."""
    pair = tl.arange(0, DP // 2).to(tl.float64)
    turns = tl.full([DP // 2], TURN, tl.float64)
    if not UNIFORM:
        turns = tl.exp2(pair * (-2.0 / D) * tl.log2(turns))
    turns = turns * 0.15915494309189535 * tokens
    angle = ((turns - tl.floor(turns)) * 6.283185307179586).to(tl.float32)
    return tl.cos(angle)[None, :], tl.sin(angle)[None, :]


@triton.jit
def _turned(x, cosine, sine, HB: tl.constexpr, DP: tl.constexpr):
    """x R: pairs (a, b) -> (a cos - b sin, a sin + b cos)."""
    a, b = tl.split(tl.permute(tl.reshape(x, [HB, 2, DP // 2]), (0, 2, 1)))
    pairs = tl.join(a * cosine - b * sine, a * sine + b * cosine)
    return tl.reshape(tl.permute(pairs, (0, 2, 1)), [HB, DP])


@triton.jit
def _weight(weight, channel, held, J: tl.constexpr, CONV: tl.constexpr):
    """Weights of the token J before; those of a convolution are stored from its earliest token on."""
    w = tl.full(channel.shape, 0.0, tl.float32)
    if J < CONV:
        w = tl.load(weight + channel * CONV + (CONV - 1 - J), mask=held, other=0.0).to(tl.float32)
    return w


@triton.jit
def _bias(bias, channel, held):
    b = tl.full(channel.shape, 0.0, tl.float32)
    if bias is not None:
        b = tl.load(bias + channel, mask=held, other=0.0).to(tl.float32)
    return b


@triton.jit
def _seen(columns, tail, row, start, unit, channel, held, W, CHANNELS: tl.constexpr, CONV: tl.constexpr):
    """A token that may stand before its sequence: in the tail then, and zero without one."""
    x = tl.load(columns + row * W, mask=held & (row >= start), other=0.0).to(tl.float32)
    if tail is not None:
        at = tail + (unit * (CONV - 1) + (row - start) + (CONV - 1)) * CHANNELS + channel
        x += tl.load(at, mask=held & (row < start) & (row > start - CONV), other=0.0).to(tl.float32)
    return x


@triton.jit
def _filter(weights, biases, member, channel, held, CONV: tl.constexpr):
    """The member's convolution: weights by how far back a token is, and the bias."""
    weight, bias = (weights, biases)
    if weights is not None:
        weight = _of(weights, member)
    if biases is not None:
        bias = _of(biases, member)
    w0 = _weight(weight, channel, held, 0, CONV)
    w1 = _weight(weight, channel, held, 1, CONV)
    w2 = _weight(weight, channel, held, 2, CONV)
    w3 = _weight(weight, channel, held, 3, CONV)
    return w0, w1, w2, w3, _bias(bias, channel, held)


@triton.jit
def _before(columns, tail, first, start, unit, channel, held, W, CHANNELS: tl.constexpr, CONV: tl.constexpr):
    """What the convolution of a chunk's first token sees, from the last token back."""
    none = tl.zeros(channel.shape, dtype=tl.float32)
    x1, x2, x3 = (none, none, none)
    if CONV > 1:
        x1 = _seen(columns, tail, first - 1, start, unit, channel, held, W, CHANNELS, CONV)
    if CONV > 2:
        x2 = _seen(columns, tail, first - 2, start, unit, channel, held, W, CHANNELS, CONV)
    if CONV > 3:
        x3 = _seen(columns, tail, first - 3, start, unit, channel, held, W, CHANNELS, CONV)
    return x1, x2, x3


@triton.jit
def _four(rows, count, W, held):
    """The first rows of a chunk of `count`: as many as a walk is ahead of their use."""
    now = tl.load(rows, mask=held & (count > 0), other=0.0)
    next1 = tl.load(rows + W, mask=held & (count > 1), other=0.0)
    next2 = tl.load(rows + 2 * W, mask=held & (count > 2), other=0.0)
    next3 = tl.load(rows + 3 * W, mask=held & (count > 3), other=0.0)
    return now, next1, next2, next3


@triton.jit
def _convolve(x0, x1, x2, x3, w0, w1, w2, w3, b, CONV: tl.constexpr):
    z = x0
    if CONV > 0:
        z = x0 * w0 + b
    if CONV > 1:
        z += x1 * w1
    if CONV > 2:
        z += x2 * w2
    if CONV > 3:
        z += x3 * w3
    return z


@triton.jit
def _inverse_norm(c, D: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr):
    total = tl.sum(c * c, 1)
    if NORM != UNIT:
        total = total / D
    return tl.rsqrt(total + EPS)[:, None]


@triton.jit
def _stream(
    p, outs, news, weights, biases, tails, offsets, unit, chunk, first, end, block, T, W,
    PARTS: tl.constexpr, I: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    PART: tl.constexpr = PARTS[I]
    EACH: tl.constexpr = PART[3]
    HEADS: tl.constexpr = PART[4]
    D: tl.constexpr = PART[5]
    DP: tl.constexpr = PART[6]
    HB: tl.constexpr = PART[7]
    CONV: tl.constexpr = PART[8]
    ACT: tl.constexpr = PART[9]
    MAP: tl.constexpr = PART[10]
    NORM: tl.constexpr = PART[11]
    EPS: tl.constexpr = PART[12]
    TURN: tl.constexpr = PART[13]
    UNIFORM: tl.constexpr = PART[14]
    CHANNELS: tl.constexpr = HEADS * D
    member = block // EACH
    channel, held = _place(block % EACH, HEADS, D, DP, HB, TURN != 0)
    start, stop = unit_rows(offsets, unit, T, PACKED)
    origin = p + _number(PARTS, I, FIRST_OF, member) + channel
    scale = _number(PARTS, I, SCALE_OF, member)
    normed = _number(PARTS, I, NORMED_OF, member)
    tail = tails
    if tails is not None:
        tail = _of(tails, member)
    w0, w1, w2, w3, b = _filter(weights, biases, member, channel, held, CONV)
    x1, x2, x3 = _before(origin, tail, first, start, unit, channel, held, W, CHANNELS, CONV)
    columns = origin + first * W
    out = _of(outs, member) + first * CHANNELS + channel
    count = (end - first).to(tl.int32)
    if TURN != 0:
        cosine, sine = _angles((first - start + 1).to(tl.float64), D, DP, TURN, UNIFORM)
        step_cosine, step_sine = _angles(1.0, D, DP, TURN, UNIFORM)
    now, next1, next2, next3 = _four(columns, count, W, held)
    for n in range(0, count, 4):
        for i in tl.static_range(4):
            t = n + i
            next4 = tl.load(columns + (t + 4) * W, mask=held & (t + 4 < count), other=0.0)
            x0 = now.to(tl.float32)
            c = activate(activate(_convolve(x0, x1, x2, x3, w0, w1, w2, w3, b, CONV), ACT), MAP)
            if NORM != 0:
                r = _inverse_norm(tl.where(held, c, 0.0), D, NORM, EPS)
                c *= tl.where(normed != 0, r, 1.0)
            if TURN != 0:
                c = _turned(c, cosine, -sine, HB, DP)
                both = cosine * step_cosine - sine * step_sine
                sine = sine * step_cosine + cosine * step_sine
                cosine = both
            tl.store(out + t * CHANNELS, (c * scale).to(out.dtype.element_ty), mask=held & (t < count))
            x3 = x2
            x2 = x1
            x1 = x0
            now = next1
            next1 = next2
            next2 = next3
            next3 = next4
    for j in tl.static_range(1, CONV):
        x = _seen(origin, tail, stop - j, start, unit, channel, held & (chunk == 0), W, CHANNELS, CONV)
        new = _of(news, member)
        at = new + (unit * (CONV - 1) + (CONV - 1 - j)) * CHANNELS + channel
        tl.store(at, x.to(new.dtype.element_ty), mask=held & (chunk == 0))


@triton.jit
def _stream_backward(
    p, douts, dnews, weights, biases, tails, dp, dtails, sums, offsets, unit, chunk, first, end, block, T, W,
    PARTS: tl.constexpr, I: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    PART: tl.constexpr = PARTS[I]
    EACH: tl.constexpr = PART[3]
    HEADS: tl.constexpr = PART[4]
    D: tl.constexpr = PART[5]
    DP: tl.constexpr = PART[6]
    HB: tl.constexpr = PART[7]
    CONV: tl.constexpr = PART[8]
    ACT: tl.constexpr = PART[9]
    MAP: tl.constexpr = PART[10]
    NORM: tl.constexpr = PART[11]
    EPS: tl.constexpr = PART[12]
    TURN: tl.constexpr = PART[13]
    UNIFORM: tl.constexpr = PART[14]
    CHANNELS: tl.constexpr = HEADS * D
    LINEAR: tl.constexpr = CONV == 0 and ACT == 0 and MAP == 0 and NORM == 0  # P is not needed, and may not be there
    BACK: tl.constexpr = CONV - 1 if CONV > 0 else 0  # how far a token is seen
    member = block // EACH
    channel, held = _place(block % EACH, HEADS, D, DP, HB, TURN != 0)
    start, stop = unit_rows(offsets, unit, T, PACKED)
    origin = _number(PARTS, I, FIRST_OF, member) + channel
    scale = _number(PARTS, I, SCALE_OF, member)
    normed = _number(PARTS, I, NORMED_OF, member)
    tail, dtail, dnew = (tails, dtails, dnews)
    if tails is not None:
        tail = _of(tails, member)
        dtail = _of(dtails, member)
    if dnews is not None:
        dnew = _of(dnews, member)
    w0, w1, w2, w3, b = _filter(weights, biases, member, channel, held, CONV)
    none = tl.zeros([HB, DP], dtype=tl.float32)
    d1, d2, d3, s0, s1, s2, s3, sb = (none, none, none, none, none, none, none, none)
    x1, x2, x3 = (none, none, none)
    if CONV > 1:
        x1, x2, x3 = _before(p + origin, tail, first, start, unit, channel, held, W, CHANNELS, CONV)
    if TURN != 0:
        cosine, sine = _angles((first - start + 1).to(tl.float64), D, DP, TURN, UNIFORM)
        step_cosine, step_sine = _angles(1.0, D, DP, TURN, UNIFORM)
    dcolumns = dp + first * W + origin
    dout = _of(douts, member) + first * CHANNELS + channel
    own = (end - first).to(tl.int32)
    there = tl.minimum(stop - first, own + BACK).to(tl.int32)  # tokens of the unit whose dz is needed
    if LINEAR:
        x_now, x_next1, x_next2, x_next3 = (none, none, none, none)
    else:
        columns = p + first * W + origin
        x_now, x_next1, x_next2, x_next3 = _four(columns, there, W, held)
    g_now, g_next1, g_next2, g_next3 = _four(dout, there, CHANNELS, held)
    for n in range(0, tl.where(own > 0, own + BACK, 0), 4):
        for i in tl.static_range(4):
            t = n + i
            if LINEAR:
                x_next4 = none
            else:
                x_next4 = tl.load(columns + (t + 4) * W, mask=held & (t + 4 < there), other=0.0)
            g_next4 = tl.load(dout + (t + 4) * CHANNELS, mask=held & (t + 4 < there), other=0.0)
            x0 = x_now.to(tl.float32)
            z = _convolve(x0, x1, x2, x3, w0, w1, w2, w3, b, CONV)
            a = activate(z, ACT)
            d0 = g_now.to(tl.float32) * scale
            if TURN != 0:
                d0 = _turned(d0, cosine, sine, HB, DP)
                both = cosine * step_cosine - sine * step_sine
                sine = sine * step_cosine + cosine * step_sine
                cosine = both
            if NORM != 0:
                y = tl.where(held, activate(a, MAP), 0.0)
                r = _inverse_norm(y, D, NORM, EPS)
                y *= r
                along = tl.sum(y * d0, 1)[:, None]
                if NORM != UNIT:
                    along = along / D
                d0 = tl.where(normed != 0, r * (d0 - y * along), d0)
            d0 *= slope(a, MAP) * slope(z, ACT)
            if CONV > 0:
                mine = tl.where(t < own, d0, 0.0)  # the others' sums are their own programs'
                s0 += mine * x0
                sb += mine
            if CONV > 1:
                s1 += mine * x1
            if CONV > 2:
                s2 += mine * x2
            if CONV > 3:
                s3 += mine * x3
            e = t - BACK  # whose dx is complete now
            dx = d0
            if CONV == 1:
                dx = d0 * w0
            if CONV == 2:
                dx = d1 * w0 + d0 * w1
            if CONV == 3:
                dx = d2 * w0 + d1 * w1 + d0 * w2
            if CONV == 4:
                dx = d3 * w0 + d2 * w1 + d1 * w2 + d0 * w3
            if dnews is not None:
                at = dnew + (unit * BACK + (first - stop) + (e + BACK)) * CHANNELS + channel
                late = (first + e >= stop - BACK) & (e < own)
                dx += tl.load(at, mask=held & late, other=0.0).to(tl.float32)
            tl.store(dcolumns + e * W, dx.to(dp.dtype.element_ty), mask=held & (e >= 0) & (e < own))
            if dtails is not None:
                at = dtail + (unit * BACK + (first - start) + (e + BACK)) * CHANNELS + channel
                tl.store(at, dx.to(dtail.dtype.element_ty), mask=held & (e < 0) & (first == start))
            x3 = x2
            x2 = x1
            x1 = x0
            d3 = d2
            d2 = d1
            d1 = d0
            x_now = x_next1
            x_next1 = x_next2
            x_next2 = x_next3
            x_next3 = x_next4
            g_now = g_next1
            g_next1 = g_next2
            g_next2 = g_next3
            g_next3 = g_next4
    if CONV > 0:
        to = sums + _number(PARTS, I, SUMS_OF, member)
        at = to + channel * CONV + (CONV - 1)
        tl.store(at, s0, mask=held)
        if CONV > 1:
            tl.store(at - 1, s1, mask=held)
        if CONV > 2:
            tl.store(at - 2, s2, mask=held)
        if CONV > 3:
            tl.store(at - 3, s3, mask=held)
        if biases is not None:
            tl.store(to + CHANNELS * CONV + channel, sb, mask=held)
    if dtails is not None:
        empty = held & (start == stop) & (chunk == 0)  # nothing came: the new tail is the old one
        for j in tl.static_range(BACK):
            at = (unit * BACK + j) * CHANNELS + channel
            passed = none
            if dnews is not None:
                passed = tl.load(dnew + at, mask=empty, other=0.0).to(tl.float32)
            tl.store(dtail + at, passed.to(dtail.dtype.element_ty), mask=empty)


# ---- numbers ---------------------------------------------------------------------------------------------------------


@triton.jit
def _numbers(
    p, out, step, rate, bias, first, end, block, W, PARTS: tl.constexpr, I: tl.constexpr
):  # fmt: skip
    PART: tl.constexpr = PARTS[I]
    FIRST: tl.constexpr = PART[3]
    COLUMNS: tl.constexpr = PART[4]
    BC: tl.constexpr = PART[5]
    BT: tl.constexpr = PART[6]
    CHART: tl.constexpr = PART[7]
    FACTOR: tl.constexpr = PART[8]
    column = block * BC + tl.arange(0, BC)
    held = column < COLUMNS
    b = _bias(bias, column, held)
    if CHART == SSM:
        scale = -tl.exp(tl.load(rate + column, mask=held, other=0.0).to(tl.float32))
    if CHART != NOTHING:
        for t in range(first, end, BT):
            row = t + tl.arange(0, BT).to(tl.int64)
            inside = (row < end)[:, None] & held[None, :]
            z = tl.load(p + row[:, None] * W + FIRST + column[None, :], mask=inside, other=0.0).to(tl.float32)
            y = chart(z + b[None, :], CHART)
            at = row[:, None] * COLUMNS + column[None, :]
            if CHART == SSM:
                if step is not None:
                    tl.store(step + at, y, mask=inside)
                y *= scale[None, :]
            tl.store(out + at, (y * FACTOR).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _numbers_backward(
    p, dout, dstep, rate, bias, dp, sums, first, end, block, W, PARTS: tl.constexpr, I: tl.constexpr
):  # fmt: skip
    """sums: this slot's, of the rate and then the bias."""
    PART: tl.constexpr = PARTS[I]
    FIRST: tl.constexpr = PART[3]
    COLUMNS: tl.constexpr = PART[4]
    BC: tl.constexpr = PART[5]
    BT: tl.constexpr = PART[6]
    CHART: tl.constexpr = PART[7]
    FACTOR: tl.constexpr = PART[8]
    sums += PART[9]
    column = block * BC + tl.arange(0, BC)
    held = column < COLUMNS
    b = _bias(bias, column, held)
    sb = tl.zeros([BC], dtype=tl.float32)
    sr = tl.zeros([BC], dtype=tl.float32)
    if CHART == SSM:
        scale = -tl.exp(tl.load(rate + column, mask=held, other=0.0).to(tl.float32))
    for t in range(first, end, BT):
        row = t + tl.arange(0, BT).to(tl.int64)
        inside = (row < end)[:, None] & held[None, :]
        at = row[:, None] * W + FIRST + column[None, :]
        dz = tl.zeros([BT, BC], dtype=tl.float32)
        if CHART != NOTHING:
            z = dz
            if p is not None:
                z = tl.load(p + at, mask=inside, other=0.0).to(tl.float32) + b[None, :]
            here = row[:, None] * COLUMNS + column[None, :]
            dz = tl.load(dout + here, mask=inside, other=0.0).to(tl.float32) * FACTOR
            if CHART == SSM:
                dz *= scale[None, :]
                sr += tl.sum(dz * chart(z, CHART), 0)
                if dstep is not None:
                    dz += tl.load(dstep + here, mask=inside, other=0.0)
            dz *= chart_slope(z, CHART)
            sb += tl.sum(dz, 0)
        tl.store(dp + at, dz.to(dp.dtype.element_ty), mask=inside)
    if CHART == SSM:
        tl.store(sums + column, sr, mask=held)
        sums += COLUMNS
    if bias is not None:
        tl.store(sums + column, sb, mask=held)


# ---- kernels: slots of chunks times the blocks of all parts ----------------------------------------------------------


@Kernel
@triton.jit(do_not_specialize=["T", "N", "L"])
def enter(
    p, outs, others, weights, biases, tails, offsets, units, T, N, L,
    W: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """others: new tails of streams, step sizes of "ssm"; weights: of convolutions, log rates of "ssm"."""
    slot = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    unit, first, end = slot_rows(offsets, units, slot, T, N, L, PACKED)
    begin, _ = unit_rows(offsets, unit, T, PACKED)
    chunk = slot - first_slot(begin, unit, N, L, PACKED)
    for i in tl.static_range(len(PARTS)):
        own = block - PARTS[i][1]
        if (own >= 0) & (own < PARTS[i][2]):
            if PARTS[i][0] == STREAM:
                _stream(
                    p, outs[i], others[i], weights[i], biases[i], tails[i], offsets, unit, chunk, first, end, own,
                    T, W, PARTS, i, PACKED,
                )  # fmt: skip
            else:
                _numbers(p, outs[i], others[i], weights[i], biases[i], first, end, own, W, PARTS, i)


@Kernel
@triton.jit(do_not_specialize=["T", "N", "L"])
def enter_backward(
    p, douts, dothers, weights, biases, tails, dp, dtails, sums, offsets, units, T, N, L,
    W: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr, SUMS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """sums (slots, SUMS): of gradients of every part's parameters, over the tokens of a slot."""
    slot = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    unit, first, end = slot_rows(offsets, units, slot, T, N, L, PACKED)
    begin, _ = unit_rows(offsets, unit, T, PACKED)
    chunk = slot - first_slot(begin, unit, N, L, PACKED)
    sums += slot.to(tl.int64) * SUMS
    for i in tl.static_range(len(PARTS)):
        own = block - PARTS[i][1]
        if (own >= 0) & (own < PARTS[i][2]):
            if PARTS[i][0] == STREAM:
                _stream_backward(
                    p, douts[i], dothers[i], weights[i], biases[i], tails[i], dp, dtails[i], sums, offsets, unit,
                    chunk, first, end, own, T, W, PARTS, i, PACKED,
                )  # fmt: skip
            else:
                _numbers_backward(
                    p, douts[i], dothers[i], weights[i], biases[i], dp, sums, first, end, own, W, PARTS, i
                )  # fmt: skip
