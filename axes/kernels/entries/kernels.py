"""A chain of entries over the tokens of a unit, device side; `axes.kernels.entries.chain` has the formulas.

A program has one unit and a block of BR rows of the state, one key entry after another. Every token of a chunk is a
tensor of its own, a member of a tuple, so that a thread has its rows of all C tokens in registers and a step of the
recurrence is one multiplication and one addition, in order; nothing moves between threads but sums over rows. What a
chunk of tokens is given is asked for while the one before is computed where a state has one entry a row (AHEAD).
"""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common.launch import Kernel
from axes.kernels.common.tiles import first_slot, unit_rows


@triton.jit
def _rows(ptr, first, end, H, head, r, V, GIVEN: tl.constexpr, C: tl.constexpr):
    """C rows of a (tokens, H, V) tensor, in its dtype: zeros where there are none."""
    out = ()
    for i in tl.static_range(C):
        if GIVEN:
            token = first + i
            x = tl.load(ptr + (token * H + head) * V + r, mask=(r < V) & (token < end), other=0.0)
        else:
            x = tl.zeros(r.shape, dtype=tl.float32)
        out = out + (x,)  # type: ignore[assignment]
    return out


@triton.jit
def _put(ptr, rows, first, end, H, head, r, V, C: tl.constexpr):
    """Write what `_rows` would read."""
    for i in tl.static_range(C):
        token = first + i
        place = ptr + (token * H + head) * V + r
        tl.store(place, rows[i].to(ptr.dtype.element_ty), mask=(r < V) & (token < end))


@triton.jit
def _wide(rows, C: tl.constexpr):
    """The same numbers in float32."""
    out = ()
    for i in tl.static_range(C):
        out = out + (rows[i].to(tl.float32),)  # type: ignore[assignment]
    return out


@triton.jit
def _numbers(ptr, first, end, H, head, j, K, C: tl.constexpr):
    """The j-th entry of C tokens' keys or queries, as numbers."""
    out = ()
    for i in tl.static_range(C):
        token = first + i
        x = tl.load(ptr + (token * H + head) * K + j, mask=token < end, other=0.0)
        out = out + (x.to(tl.float32),)  # type: ignore[assignment]
    return out


@triton.jit
def _spectra(
    ptr, first, end, HV, head, r, j, V, K, VARIES: tl.constexpr, GIVEN: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """The logs of (HV, K, V) that all tokens share, once a token; or those of C tokens, of (tokens, HV, K, V)."""
    out = ()
    if GIVEN and not VARIES:
        shared = tl.load(ptr + (head * K + j) * V + r, mask=r < V, other=0.0)
    for i in tl.static_range(C):
        if GIVEN and VARIES:
            token = first + i
            x = tl.load(ptr + ((token * HV + head) * K + j) * V + r, mask=(r < V) & (token < end), other=0.0)
            out = out + (x,)  # type: ignore[assignment]
        elif GIVEN:
            out = out + (tl.where(first + i < end, shared, 0.0),)  # type: ignore[assignment]
        else:
            out = out + (tl.zeros(r.shape, dtype=tl.float32),)  # type: ignore[assignment]
    return out


@triton.jit
def _kept(gate, times, spectrum, GATED: tl.constexpr, TIMES: tl.constexpr, SPECTRUM: tl.constexpr):
    """e^(g + dt a) of what there is: a factor. What is a row's is brought to base 2 before it meets entries."""
    if SPECTRUM and TIMES:
        log = spectrum * (times * 1.4426950408889634)
    elif SPECTRUM:
        log = spectrum * 1.4426950408889634
    if SPECTRUM and GATED:
        log += gate * 1.4426950408889634
    elif GATED:
        log = gate * 1.4426950408889634
    if SPECTRUM or GATED:
        kept = tl.exp2(log)
    else:
        kept = 1.0
    return kept


@triton.jit
def _strength(beta, times, STRONG: tl.constexpr, TIED: tl.constexpr):
    """How much of its error a token writes."""
    if STRONG:
        b = beta
    elif TIED:
        b = times
    else:
        b = 1.0
    return b


@triton.jit
def _error(s, kept, key, v, ERASE: tl.constexpr):
    """What is written but for key and strength."""
    if ERASE == "none":
        error = v
    elif ERASE == "prev":
        error = v - key * s
    else:
        error = v - key * (s * kept)
    return error


@triton.jit
def _moved(s, kept, c, key, v, ERASE: tl.constexpr):
    """The state after a token."""
    return s * kept + key * (c * _error(s, kept, key, v, ERASE))


@Kernel
@triton.jit(do_not_specialize=["T", "N"])
def forward(
    q, k, v, gate, times, spectrum, beta, state, saved, o, offsets, T, N, H, HV, V, BLOCKS,
    K: tl.constexpr, BR: tl.constexpr, C: tl.constexpr, ERASE: tl.constexpr,
    GATED: tl.constexpr, TIMES: tl.constexpr, SPECTRUM: tl.constexpr, VARIES: tl.constexpr,
    STRONG: tl.constexpr, TIED: tl.constexpr, SAVE: tl.constexpr, PACKED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """o, and the last state in the place of the first, `state` (units, HV, K, V); with SAVE those before chunks."""
    program = tl.program_id(0)
    unit, head, block = program // BLOCKS // HV, program // BLOCKS % HV, program % BLOCKS
    source = head // (HV // H)
    start, end = unit_rows(offsets, unit, T, PACKED)
    slot = first_slot(start, unit, N, C, PACKED)
    r = block * BR + tl.arange(0, BR)
    inside = r < V
    own = state + (unit.to(tl.int64) * HV + head) * K * V + r
    if AHEAD:
        vs = _rows(v, start, end, HV, head, r, V, True, C)
        gates = _rows(gate, start, end, HV, head, r, V, GATED, C)
        dts = _rows(times, start, end, HV, head, r, V, TIMES, C)
        betas = _rows(beta, start, end, HV, head, r, V, STRONG, C)
    s = tl.zeros([BR], dtype=tl.float32)
    if K == 1:
        s = tl.load(own, mask=inside, other=0.0)
    for first in range(start, end, C):
        if AHEAD:
            later = first + C
            next_v = _rows(v, later, end, HV, head, r, V, True, C)
            next_gate = _rows(gate, later, end, HV, head, r, V, GATED, C)
            next_times = _rows(times, later, end, HV, head, r, V, TIMES, C)
            next_beta = _rows(beta, later, end, HV, head, r, V, STRONG, C)
        else:
            vs = _rows(v, first, end, HV, head, r, V, True, C)
            gates = _rows(gate, first, end, HV, head, r, V, GATED, C)
            dts = _rows(times, first, end, HV, head, r, V, TIMES, C)
            betas = _rows(beta, first, end, HV, head, r, V, STRONG, C)
        v_, g_, t_, b_ = _wide(vs, C), _wide(gates, C), _wide(dts, C), _wide(betas, C)
        kept_there = saved + (slot * HV + head) * K * V + r
        out = ()
        for _ in tl.static_range(C):
            out = out + (tl.zeros([BR], dtype=tl.float32),)  # type: ignore[assignment]
        for j in range(K):
            if K > 1:
                s = tl.load(own + j * V, mask=inside, other=0.0)
            if SAVE:
                tl.store(kept_there + j * V, s, mask=inside)
            keys = _numbers(k, first, end, H, source, j, K, C)
            queries = _numbers(q, first, end, H, source, j, K, C)
            logs = _spectra(spectrum, first, end, HV, head, r, j, V, K, VARIES, SPECTRUM, C)
            more = ()
            for i in tl.static_range(C):
                kept = _kept(g_[i], t_[i], logs[i], GATED, TIMES, SPECTRUM)
                c = _strength(b_[i], t_[i], STRONG, TIED)
                s = _moved(s, kept, c, keys[i], v_[i], ERASE)
                more = more + (out[i] + queries[i] * s,)  # type: ignore[assignment]
            out = more
            if K > 1:
                tl.store(own + j * V, s, mask=inside)
        _put(o, out, first, end, HV, head, r, V, C)
        slot += 1
        if AHEAD:
            vs, gates, dts, betas = next_v, next_gate, next_times, next_beta
    if K == 1:
        tl.store(own, s, mask=inside)


@Kernel
@triton.jit(do_not_specialize=["T", "N"])
def backward(
    q, k, v, gate, times, spectrum, beta, saved, do, carry, dq, dk, dv, dgate, dtimes, dspectrum, dbeta,
    offsets, T, N, H, HV, V, BLOCKS,
    K: tl.constexpr, BR: tl.constexpr, C: tl.constexpr, ERASE: tl.constexpr,
    GATED: tl.constexpr, TIMES: tl.constexpr, SPECTRUM: tl.constexpr, VARIES: tl.constexpr,
    STRONG: tl.constexpr, TIED: tl.constexpr, KEYS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Gradients. carry (units, HV, K, V): of the last state, and at the end of the first; dq and dk (tokens, HV,
    BLOCKS, K): a block's part; dspectrum (units, HV, K, V), zeros before, or that of every token where it varies."""
    program = tl.program_id(0)
    unit, head, block = program // BLOCKS // HV, program // BLOCKS % HV, program % BLOCKS
    source = head // (HV // H)
    start, end = unit_rows(offsets, unit, T, PACKED)
    base = first_slot(start, unit, N, C, PACKED)
    r = block * BR + tl.arange(0, BR)
    inside = r < V
    mine = (unit.to(tl.int64) * HV + head) * K * V + r
    for n in range(tl.cdiv(end - start, C)):
        chunk = tl.cdiv(end - start, C) - 1 - n
        first = start + chunk * C
        v_ = _wide(_rows(v, first, end, HV, head, r, V, True, C), C)
        g_ = _wide(_rows(gate, first, end, HV, head, r, V, GATED, C), C)
        t_ = _wide(_rows(times, first, end, HV, head, r, V, TIMES, C), C)
        b_ = _wide(_rows(beta, first, end, HV, head, r, V, STRONG, C), C)
        do_ = _wide(_rows(do, first, end, HV, head, r, V, True, C), C)
        kept_there = saved + ((base + chunk) * HV + head) * K * V + r
        zeros = ()
        for _ in tl.static_range(C):
            zeros = zeros + (tl.zeros([BR], dtype=tl.float32),)  # type: ignore[assignment]
        to_v, to_gate, to_times, to_beta = zeros, zeros, zeros, zeros
        for j in range(K):
            s = tl.load(kept_there + j * V, mask=inside, other=0.0)
            d = tl.load(carry + mine + j * V, mask=inside, other=0.0)
            keys = _numbers(k, first, end, H, source, j, K, C)
            queries = _numbers(q, first, end, H, source, j, K, C)
            logs = _spectra(spectrum, first, end, HV, head, r, j, V, K, VARIES, SPECTRUM, C)
            states = (s,)
            for i in tl.static_range(C):
                kept = _kept(g_[i], t_[i], logs[i], GATED, TIMES, SPECTRUM)
                c = _strength(b_[i], t_[i], STRONG, TIED)
                s = _moved(s, kept, c, keys[i], v_[i], ERASE)
                states = states + (s,)  # type: ignore[assignment]
            by_spectrum = tl.zeros([BR], dtype=tl.float32)
            new_v, new_gate, new_times, new_beta = (), (), (), ()
            for i in tl.static_range(C - 1, -1, -1):
                token = first + i
                key = keys[i]
                d += do_[i] * queries[i]
                kept = _kept(g_[i], t_[i], logs[i], GATED, TIMES, SPECTRUM)
                c = _strength(b_[i], t_[i], STRONG, TIED)
                error = _error(states[i], kept, key, v_[i], ERASE)
                by_strength = d * key * error
                by_value = d * c * key  # what the error hears
                if KEYS:
                    there = ((token * HV + head) * BLOCKS + block) * K + j
                    of_key = d * c * error
                    if ERASE == "prev":
                        of_key -= by_value * states[i]
                    elif ERASE != "none":
                        of_key -= by_value * states[i] * kept
                    tl.store(dq + there, tl.sum(do_[i] * states[i + 1], 0), mask=token < end)
                    tl.store(dk + there, tl.sum(of_key, 0), mask=token < end)
                if ERASE == "none":
                    into = d
                    before = d * kept
                elif ERASE == "prev":
                    into = d
                    before = d * kept - by_value * key
                else:
                    into = d - by_value * key
                    before = into * kept
                by_log = into * kept * states[i]
                new_v = (to_v[i] + by_value,) + new_v  # type: ignore[assignment]
                new_gate = (to_gate[i] + by_log,) + new_gate  # type: ignore[assignment]
                if TIMES:
                    by_times = by_log * logs[i]
                    if TIED:
                        by_times += by_strength
                    new_times = (to_times[i] + by_times,) + new_times  # type: ignore[assignment]
                else:
                    new_times = (to_times[i],) + new_times  # type: ignore[assignment]
                new_beta = (to_beta[i] + by_strength,) + new_beta  # type: ignore[assignment]
                if SPECTRUM:
                    if TIMES:
                        by_log *= t_[i]
                    if VARIES:
                        varied = dspectrum + ((token * HV + head) * K + j) * V + r
                        tl.store(varied, by_log, mask=inside & (token < end))
                    elif TIMES:
                        by_spectrum += by_log
                    else:
                        by_spectrum += tl.where(token < end, by_log, 0.0)
                d = before
            to_v, to_gate, to_times, to_beta = new_v, new_gate, new_times, new_beta
            tl.store(carry + mine + j * V, d, mask=inside)
            if SPECTRUM and not VARIES:
                held = tl.load(dspectrum + mine + j * V, mask=inside, other=0.0)
                tl.store(dspectrum + mine + j * V, held + by_spectrum, mask=inside)
        _put(dv, to_v, first, end, HV, head, r, V, C)
        if GATED:
            _put(dgate, to_gate, first, end, HV, head, r, V, C)
        if TIMES:
            _put(dtimes, to_times, first, end, HV, head, r, V, C)
        if STRONG:
            _put(dbeta, to_beta, first, end, HV, head, r, V, C)
