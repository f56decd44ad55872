"""The forms of `axes.programs.storage` in registers: what a generated kernel loads and stores."""

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # which knows no machine code
_SMALLEST = tl.constexpr(7.52316384526264e-37)
_ROUNDS = tl.constexpr(7)
_SHIFT = tl.constexpr(12582912.0)
_MANTISSA = tl.constexpr(0x4B400000)


@triton.jit
def _bits(x):
    return tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)


@triton.jit
def _high(bits):
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def join_16(high, low):
    upper = high.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return (upper + low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def cut_16(x):
    bits = _bits(x)
    low = bits.to(tl.int16)
    return _high(bits - low.to(tl.int32)), low


@triton.jit
def join_8(high, low):
    upper = high.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return (upper + (low.to(tl.int32) << 8)).to(tl.float32, bitcast=True)


@triton.jit
def cut_8(x, up):
    """up: 0x80 to round to nearest, a random byte to round at random."""
    bits = _bits(x) + up
    return _high(bits + 0x8000), (bits >> 8).to(tl.int8)


@triton.jit
def bfloat16_at_random(x, word):
    part = tl.where(x == x, (word & 0xFFFF).to(tl.int32), 0)  # a NaN of all ones would carry over into -0
    return _high(_bits(x) + part)


@triton.jit
def quotient(x, y):
    """x / y to two last bits for 2^-126 <= |y| <= 2^126: beside codes of 8 bits a wider range is not worth its cost."""
    if _INTERPRETED:
        return x / y
    return tl.inline_asm_elementwise("div.approx.ftz.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, True, 1)


@triton.jit
def _root(x):
    """A square root for codes: to the last bit, and 0 for what is no normal float32."""
    if _INTERPRETED:
        return tl.sqrt(x)
    return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _number(code):
    """An integer below 2^22 as a float32: placed in the mantissa of 3 * 2^22, which costs no conversion."""
    return (code.to(tl.int32) + _MANTISSA).to(tl.float32, bitcast=True) - _SHIFT


@triton.jit
def _nearest(x):
    """The nearest integer, ties to even, in the low bits: the sum with 3 * 2^22 rounds it."""
    return (x + _SHIFT).to(tl.int32, bitcast=True)


@triton.jit
def decode_signed(code, unit):
    c = _number(code)
    return c * tl.abs(c) * unit[:, None]


@triton.jit
def decode_root(code, unit):
    c = _number(code)
    c = c * c
    return c * c * unit[:, None]


@triton.jit
def _unit(x, part: tl.constexpr):
    """The bits of |x| are in the order of the numbers, and what is no number comes last."""
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    return tl.where(top < float("inf"), tl.maximum(top * part, _SMALLEST), float("inf"))


@triton.jit
def encode_signed(x):
    unit = _unit(x, 1.0 / 127.0**2)
    size = _root(tl.abs(x) * (1.0 / unit)[:, None]).to(tl.int32, bitcast=True)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return _nearest((size | sign).to(tl.float32, bitcast=True)).to(tl.int8), unit


@triton.jit
def encode_root(x):
    unit = _unit(x, 1.0 / 255.0**4)
    size = tl.maximum(_root(_root(x * (1.0 / unit)[:, None])), 1.0)
    return _nearest(tl.where(x > 0, size, 0.0)).to(tl.uint8), unit


@triton.jit
def words(seed, place, step, stream):
    """Random 32-bit words: `axes.programs.storage.philox`."""
    low, high = place.to(tl.uint32), (place >> 32).to(tl.uint32)
    zero = low * 0
    word, _, _, _ = tl.philox_impl(
        low,
        high,
        zero + step.to(tl.uint32),
        zero + stream.to(tl.uint32),
        (seed & 0xFFFFFFFF).to(tl.uint32),
        ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32),
        _ROUNDS,
    )
    return word
