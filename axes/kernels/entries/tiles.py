"""A chain of entries with several key entries a row, device side: a state stays on chip for all of its tokens.

`axes.kernels.entries.chain` has the formulas. A program is one warp with RT x RL rows and all NT x NL key entries of
a unit's state: a thread holds RT rows by NT entries of it, each a tensor (NL, RL) of one number a thread, members of
a tuple. Sums over entries (o, dv, dtimes) and over rows (dq, dk) are within a thread first, then a few shuffles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from axes.kernels.common.launch import Kernel
from axes.kernels.common.tiles import first_slot, unit_rows
from axes.kernels.entries.kernels import _error, _kept, _moved, _strength, _wide


@triton.jit
def _zeros(ptr, shape: tl.constexpr, GIVEN: tl.constexpr, COUNT: tl.constexpr):
    """Before the first chunk of tokens is there."""
    out = ()
    for _ in tl.static_range(COUNT):
        if GIVEN:
            x = tl.zeros(shape, dtype=ptr.dtype.element_ty)
        else:
            x = tl.zeros(shape, dtype=tl.float32)
        out = out + (x,)  # type: ignore[assignment]
    return out


@triton.jit
def _rows(ptr, first, end, H, head, r, V, GIVEN: tl.constexpr, C: tl.constexpr, RL: tl.constexpr, RT: tl.constexpr):
    """Rows of C tokens of a (tokens, H, V) tensor, in its dtype: C x RT tensors (1, RL), zeros where there are none."""
    out = ()
    for i in tl.static_range(C):
        token = first + i
        place = ptr + (token * H + head) * V + r
        for m in tl.static_range(RT):
            if GIVEN:
                x = tl.load(place + m * RL, mask=(r + m * RL < V) & (token < end), other=0.0)
            else:
                x = tl.zeros(r.shape, dtype=tl.float32)
            out = out + (x,)  # type: ignore[assignment]
    return out


@triton.jit
def _entries(ptr, first, end, H, head, n, K, C: tl.constexpr, NL: tl.constexpr, NT: tl.constexpr):
    """Key entries of C tokens: C x NT tensors (NL, 1), zeros where there are none."""
    out = ()
    for i in tl.static_range(C):
        token = first + i
        place = ptr + (token * H + head) * K + n
        for m in tl.static_range(NT):
            x = tl.load(place + m * NL, mask=(n + m * NL < K) & (token < end), other=0.0)
            out = out + (x,)  # type: ignore[assignment]
    return out


@triton.jit
def _state(ptr, n, r, K, V, NL: tl.constexpr, RL: tl.constexpr, NT: tl.constexpr, RT: tl.constexpr):
    """A state (K, V) as RT x NT tensors (NL, RL)."""
    out = ()
    for m in tl.static_range(RT):
        for j in tl.static_range(NT):
            place = ptr + (n + j * NL) * V + r
            x = tl.load(place + m * RL, mask=(n + j * NL < K) & (r + m * RL < V), other=0.0)
            out = out + (x.to(tl.float32),)  # type: ignore[assignment]
    return out


@triton.jit
def _put_state(ptr, state, n, r, K, V, NL: tl.constexpr, RL: tl.constexpr, NT: tl.constexpr, RT: tl.constexpr):
    """Write what `_state` would read."""
    for m in tl.static_range(RT):
        for j in tl.static_range(NT):
            place = ptr + (n + j * NL) * V + r
            x = state[m * NT + j].to(ptr.dtype.element_ty)
            tl.store(place + m * RL, x, mask=(n + j * NL < K) & (r + m * RL < V))


@triton.jit
def _length(keys, first, IMPLICIT: tl.constexpr, NT: tl.constexpr):
    """|k|^2 of a token whose entries begin at `first`."""
    length = 0.0
    if IMPLICIT:
        squares = keys[first] * keys[first]
        for j in tl.static_range(1, NT):
            squares += keys[first + j] * keys[first + j]
        length = tl.sum(squares, 0, keep_dims=True)
    return length


@triton.jit
def _shrunk(strength, length, IMPLICIT: tl.constexpr):
    """The strength of an implicit step, which shrinks by the whole key."""
    c = strength
    if IMPLICIT:
        c = strength / (1.0 + strength * length)
    return c


@triton.jit
def _put_rows(ptr, x, token, there, H, head, r, V, M: tl.constexpr):
    """Write a token's rows, summed over the entries that other threads hold; M: how far behind r."""
    whole = tl.sum(x, 0, keep_dims=True).to(ptr.dtype.element_ty)
    tl.store(ptr + (token * H + head) * V + r + M, whole, mask=(r + M < V) & there)


@Kernel
@triton.jit(do_not_specialize=["T", "N"])
def forward(
    q, k, v, gate, times, spectrum, beta, state, saved, o, offsets, T, N, H, HV, V, BLOCKS,
    K: tl.constexpr, RL: tl.constexpr, RT: tl.constexpr, NL: tl.constexpr, NT: tl.constexpr,
    C: tl.constexpr, ERASE: tl.constexpr,
    GATED: tl.constexpr, TIMES: tl.constexpr, SPECTRUM: tl.constexpr, VARIES: tl.constexpr,
    STRONG: tl.constexpr, TIED: tl.constexpr, IMPLICIT: tl.constexpr, SAVE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """o, and the last state in the place of the first, `state` (units, HV, K, V); with SAVE those before chunks."""
    program = tl.program_id(0)
    unit, head, block = program // BLOCKS // HV, program // BLOCKS % HV, program % BLOCKS
    source = head // (HV // H)
    start, end = unit_rows(offsets, unit, T, PACKED)
    slot = first_slot(start, unit, N, C, PACKED)
    r = block * (RL * RT) + tl.arange(0, RL)[None, :]
    n = tl.arange(0, NL)[:, None]
    own = state + (unit.to(tl.int64) * HV + head) * K * V
    s = _state(own, n, r, K, V, NL, RL, NT, RT)
    if SPECTRUM and not VARIES:
        shared = _state(spectrum + head * K * V, n, r, K, V, NL, RL, NT, RT)
    # a round works on what the one before asked for, the first one on zeros, which leave a state as it is
    vs, gates = _zeros(v, [1, RL], True, C * RT), _zeros(gate, [1, RL], GATED, C * RT)
    dts, betas = _zeros(times, [1, RL], TIMES, C * RT), _zeros(beta, [1, RL], STRONG, C * RT)
    keys, queries = _zeros(k, [NL, 1], True, C * NT), _zeros(q, [NL, 1], True, C * NT)
    for ahead in range(start, end + C, C):
        first = ahead - C
        v_, g_, t_, b_ = _wide(vs, C * RT), _wide(gates, C * RT), _wide(dts, C * RT), _wide(betas, C * RT)
        k_, q_ = _wide(keys, C * NT), _wide(queries, C * NT)
        vs = _rows(v, ahead, end, HV, head, r, V, True, C, RL, RT)
        gates = _rows(gate, ahead, end, HV, head, r, V, GATED, C, RL, RT)
        dts = _rows(times, ahead, end, HV, head, r, V, TIMES, C, RL, RT)
        betas = _rows(beta, ahead, end, HV, head, r, V, STRONG, C, RL, RT)
        keys = _entries(k, ahead, end, H, source, n, K, C, NL, NT)
        queries = _entries(q, ahead, end, H, source, n, K, C, NL, NT)
        if SAVE:  # noqa: SIM102  # known to the compiler, the other is not
            if first >= start:
                _put_state(saved + (slot * HV + head) * K * V, s, n, r, K, V, NL, RL, NT, RT)
                slot += 1
        for i in tl.static_range(C):
            token = first + i
            inside = (token >= start) & (token < end)
            length = _length(k_, i * NT, IMPLICIT, NT)
            moved = ()
            for m in tl.static_range(RT):
                out = tl.zeros([NL, RL], dtype=tl.float32)
                c = _shrunk(_strength(b_[i * RT + m], t_[i * RT + m], STRONG, TIED), length, IMPLICIT)
                for j in tl.static_range(NT):
                    log = 0.0
                    if SPECTRUM and VARIES:
                        entry, row = n + j * NL, r + m * RL
                        at = spectrum + ((token * HV + head) * K + entry) * V + row
                        log = tl.load(at, mask=(entry < K) & (row < V) & inside, other=0.0)
                    elif SPECTRUM:
                        log = shared[m * NT + j]
                        if not TIMES:
                            log = tl.where(inside, log, 0.0)
                    kept = _kept(g_[i * RT + m], t_[i * RT + m], log, GATED, TIMES, SPECTRUM)
                    x = _moved(s[m * NT + j], kept, c, k_[i * NT + j], v_[i * RT + m], ERASE)
                    out += q_[i * NT + j] * x
                    moved = moved + (x,)  # type: ignore[assignment]
                _put_rows(o, out, token, inside, HV, head, r, V, m * RL)
            s = moved
    _put_state(own, s, n, r, K, V, NL, RL, NT, RT)


@Kernel
@triton.jit(do_not_specialize=["T", "N"])
def backward(
    q, k, v, gate, times, spectrum, beta, saved, do, carry, dq, dk, dv, dgate, dtimes, dspectrum, dbeta,
    offsets, T, N, H, HV, V, BLOCKS,
    K: tl.constexpr, RL: tl.constexpr, RT: tl.constexpr, NL: tl.constexpr, NT: tl.constexpr,
    C: tl.constexpr, ERASE: tl.constexpr,
    GATED: tl.constexpr, TIMES: tl.constexpr, SPECTRUM: tl.constexpr, VARIES: tl.constexpr,
    STRONG: tl.constexpr, TIED: tl.constexpr, IMPLICIT: tl.constexpr, KEYS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Gradients. carry (units, HV, K, V): of the last state, and at the end of the first; dq and dk (tokens, HV,
    BLOCKS, K): a block's part; dspectrum (units, HV, K, V), or that of every token where it varies."""
    program = tl.program_id(0)
    unit, head, block = program // BLOCKS // HV, program // BLOCKS % HV, program % BLOCKS
    source = head // (HV // H)
    start, end = unit_rows(offsets, unit, T, PACKED)
    base = first_slot(start, unit, N, C, PACKED)
    r = block * (RL * RT) + tl.arange(0, RL)[None, :]
    n = tl.arange(0, NL)[:, None]
    mine = (unit.to(tl.int64) * HV + head) * K * V
    d = _state(carry + mine, n, r, K, V, NL, RL, NT, RT)
    none = ()
    for _ in tl.static_range(RT * NT):
        none = none + (tl.zeros([NL, RL], dtype=tl.float32),)  # type: ignore[assignment]
    by_spectrum = none
    if SPECTRUM and not VARIES:
        shared = _state(spectrum + head * K * V, n, r, K, V, NL, RL, NT, RT)
    vs, gates = _zeros(v, [1, RL], True, C * RT), _zeros(gate, [1, RL], GATED, C * RT)
    dts, betas = _zeros(times, [1, RL], TIMES, C * RT), _zeros(beta, [1, RL], STRONG, C * RT)
    dos, held = _zeros(do, [1, RL], True, C * RT), none
    keys, queries = _zeros(k, [NL, 1], True, C * NT), _zeros(q, [NL, 1], True, C * NT)
    chunks = tl.cdiv(end - start, C)
    for back in range(chunks + 1):
        chunk = chunks - 1 - back
        first = start + chunk * C
        chunk = tl.maximum(chunk, 0)  # the one that is asked for; behind it is that which is worked on
        first += C
        v_, g_, t_, b_ = _wide(vs, C * RT), _wide(gates, C * RT), _wide(dts, C * RT), _wide(betas, C * RT)
        do_, k_, q_, states = _wide(dos, C * RT), _wide(keys, C * NT), _wide(queries, C * NT), held
        asked = start + chunk * C
        vs = _rows(v, asked, end, HV, head, r, V, True, C, RL, RT)
        gates = _rows(gate, asked, end, HV, head, r, V, GATED, C, RL, RT)
        dts = _rows(times, asked, end, HV, head, r, V, TIMES, C, RL, RT)
        betas = _rows(beta, asked, end, HV, head, r, V, STRONG, C, RL, RT)
        dos = _rows(do, asked, end, HV, head, r, V, True, C, RL, RT)
        keys = _entries(k, asked, end, H, source, n, K, C, NL, NT)
        queries = _entries(q, asked, end, H, source, n, K, C, NL, NT)
        held = _state(saved + ((base + chunk) * HV + head) * K * V, n, r, K, V, NL, RL, NT, RT)
        factors, logs, strengths = (), (), ()
        for i in tl.static_range(C):
            length = _length(k_, i * NT, IMPLICIT, NT)
            for m in tl.static_range(RT):
                c = _shrunk(_strength(b_[i * RT + m], t_[i * RT + m], STRONG, TIED), length, IMPLICIT)
                strengths = strengths + (c,)  # type: ignore[assignment]
                for j in tl.static_range(NT):
                    log = 0.0
                    if SPECTRUM and VARIES:
                        entry, row, token = n + j * NL, r + m * RL, first + i
                        there = spectrum + ((token * HV + head) * K + entry) * V + row
                        log = tl.load(there, mask=(entry < K) & (row < V) & (token < end), other=0.0)
                    elif SPECTRUM:
                        log = shared[m * NT + j]
                        if not TIMES:
                            log = tl.where(first + i < end, log, 0.0)
                    kept = _kept(g_[i * RT + m], t_[i * RT + m], log, GATED, TIMES, SPECTRUM)
                    s = states[(i * RT + m) * NT + j]  # type: ignore[var-annotated]  # an empty tuple's, to mypy
                    states = states + (_moved(s, kept, c, k_[i * NT + j], v_[i * RT + m], ERASE),)  # type: ignore[assignment]
                    logs = logs + (log,)  # type: ignore[assignment]
                    factors = factors + (kept,)  # type: ignore[assignment]
        for i in tl.static_range(C - 1, -1, -1):
            token = first + i
            to_q, to_k = none, none
            before, summed = (), ()
            for m in tl.static_range(RT):
                heard = tl.zeros([NL, RL], dtype=tl.float32)
                to_gate, to_times, to_strength = heard, heard, heard
                of_q, of_k = (), ()
                c = strengths[i * RT + m]
                value, dout = v_[i * RT + m], do_[i * RT + m]
                for j in tl.static_range(NT):
                    key, s = k_[i * NT + j], states[(i * RT + m) * NT + j]
                    kept = factors[(i * RT + m) * NT + j]
                    x = d[m * NT + j] + dout * q_[i * NT + j]
                    error = _error(s, kept, key, value, ERASE)
                    hear = x * key
                    heard += hear
                    if ERASE != "none" and (STRONG or TIED or IMPLICIT):
                        to_strength += hear * error
                    if KEYS:
                        of_q = of_q + (to_q[j] + dout * states[((i + 1) * RT + m) * NT + j],)  # type: ignore[assignment]
                        if ERASE == "none":
                            of_key = x * (c * value)
                        elif ERASE == "prev":
                            of_key = c * (x * error - hear * s)
                        else:
                            of_key = c * (x * error - hear * s * kept)
                        of_k = of_k + (to_k[j] + of_key,)  # type: ignore[assignment]
                    if ERASE == "gated":
                        x -= c * hear * key
                    back_x = x * kept
                    by_log = back_x * s
                    if ERASE == "prev":
                        back_x -= c * hear * key
                    before = before + (back_x,)  # type: ignore[assignment]
                    if GATED:
                        to_gate += by_log
                    if SPECTRUM:
                        if TIMES:
                            to_times += by_log * logs[(i * RT + m) * NT + j]
                            by_log *= t_[i * RT + m]
                        if VARIES:
                            entry, row = n + j * NL, r + m * RL
                            there = dspectrum + ((token * HV + head) * K + entry) * V + row
                            tl.store(there, by_log, mask=(entry < K) & (row < V) & (token < end))
                        else:
                            if not TIMES:
                                by_log = tl.where(token < end, by_log, 0.0)
                            summed = summed + (by_spectrum[m * NT + j] + by_log,)  # type: ignore[assignment]
                if IMPLICIT:  # c = b / (1 + b |k|^2): of dc what b and the key hear
                    whole = tl.sum(to_strength, 0, keep_dims=True)
                    if KEYS:
                        through = ()
                        for j in tl.static_range(NT):
                            through = through + (of_k[j] - 2.0 * k_[i * NT + j] * (c * c * whole),)  # type: ignore[assignment]
                        of_k = through
                    b = _strength(b_[i * RT + m], t_[i * RT + m], STRONG, TIED)
                    share = 1.0 / (1.0 + b * _length(k_, i * NT, IMPLICIT, NT))
                    to_strength *= share * share
                if KEYS:
                    to_q, to_k = of_q, of_k
                _put_rows(dv, c * heard, token, token < end, HV, head, r, V, m * RL)
                if GATED:
                    _put_rows(dgate, to_gate, token, token < end, HV, head, r, V, m * RL)
                if ERASE == "none":
                    to_strength = heard * value
                if TIMES:
                    if TIED:
                        to_times += to_strength
                    _put_rows(dtimes, to_times, token, token < end, HV, head, r, V, m * RL)
                if STRONG:
                    _put_rows(dbeta, to_strength, token, token < end, HV, head, r, V, m * RL)
            d = before
            if SPECTRUM and not VARIES:
                by_spectrum = summed
            if KEYS:
                there = ((token * HV + head) * BLOCKS + block) * K
                dq_there, dk_there = dq + there + n, dk + there + n
                for j in tl.static_range(NT):
                    inside = (n + j * NL < K) & (token < end)
                    tl.store(dq_there + j * NL, tl.sum(to_q[j], 1, keep_dims=True), mask=inside)
                    tl.store(dk_there + j * NL, tl.sum(to_k[j], 1, keep_dims=True), mask=inside)
    _put_state(carry + mine, d, n, r, K, V, NL, RL, NT, RT)
    if SPECTRUM and not VARIES:
        _put_state(dspectrum + mine, by_spectrum, n, r, K, V, NL, RL, NT, RT)
