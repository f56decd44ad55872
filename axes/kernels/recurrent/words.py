"""Numbers of 16 bits side by side in 32 or 64: one access to memory, device side."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _bits(x):
    return x.to(tl.uint16, bitcast=True).to(tl.uint64)


@triton.jit
def two(a, b, DTYPE: tl.constexpr):
    """Of two numbers in float32, by one instruction."""
    if DTYPE.is_fp16():
        return tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], tl.int32, True, 1)
    else:
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], tl.int32, True, 1)


@triton.jit
def one(pair, DTYPE: tl.constexpr):
    """The first of `two`."""
    return pair.to(tl.uint16).to(DTYPE, bitcast=True)


@triton.jit
def other(pair, DTYPE: tl.constexpr):
    return (pair >> 16).to(tl.uint16).to(DTYPE, bitcast=True)


@triton.jit
def word(a, b, c, d):
    """Of four numbers of 16 bits."""
    return (_bits(a) | _bits(b) << 16 | _bits(c) << 32 | _bits(d) << 48).to(tl.int64, bitcast=True)


@triton.jit
def word_first(a, b, c):
    """Of one number of 32 bits and two of 16."""
    first = a.to(tl.uint32, bitcast=True).to(tl.uint64)
    return (first | _bits(b) << 32 | _bits(c) << 48).to(tl.int64, bitcast=True)


@triton.jit
def _part(word, at: tl.constexpr, DTYPE: tl.constexpr):
    return (word >> at).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def apart(word, DTYPE: tl.constexpr):
    """The four of `word`, in float32."""
    return _part(word, 0, DTYPE), _part(word, 16, DTYPE), _part(word, 32, DTYPE), _part(word, 48, DTYPE)


@triton.jit
def apart_first(word, DTYPE: tl.constexpr):
    """The three of `word_first`, in float32."""
    return word.to(tl.uint32).to(tl.float32, bitcast=True), _part(word, 32, DTYPE), _part(word, 48, DTYPE)
