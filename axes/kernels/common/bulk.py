"""Tensors in tiles, as Hopper's bulk copies move them between memory and shared memory."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from axes.kernels.common.gluon import TensorDescriptor, gl


def aligned(x: Tensor) -> Tensor:
    """x, or a copy of a view at an odd address: bulk copies read from multiples of 16 bytes, and the kernels are
    compiled, and tested, for such addresses alone."""
    return x.clone() if x.data_ptr() % 16 else x


def token_tiles(x: Tensor, width: int, rows: int = 64) -> TensorDescriptor:
    """(B, T, H, D) in tiles of 64 tokens, or so many, by `width` of a head's numbers; tokens from T on are zero, never
    written."""
    b, t, h, d = x.shape
    x = aligned(x)  # never a copy of an output: those are allocated
    return _tiles(x, [b, t, h * d], [t * h * d, h * d, 1], [1, rows, width], 128)


def head_tiles(x: Tensor, rows: int) -> TensorDescriptor:
    """(B, T, H, D), features adjacent, in tiles of so many tokens of a head; as above from T on."""
    b, t, h, d = x.shape
    x = aligned(x)
    return _tiles(x, [b, h, t, d], [x.stride(0), x.stride(2), x.stride(1), 1], [1, 1, rows, d], 128)


def matrix_tiles(x: Tensor, rows: int = 0, columns: int = 0, width: int = 0) -> TensorDescriptor:
    """(..., rows, columns) in tiles of one matrix, or of so many rows and columns. width: of a row, that of x if 0."""
    width = width or x.shape[-1]
    return _tiles(x, [x.numel() // width, width], [width, 1], [rows or x.shape[-2], columns or width], 128)


def batch_tiles(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """(N, m, n), rows contiguous, in tiles of one matrix; what lies past its edge is zero, never written."""
    return _tiles(x, list(x.shape), [x.stride(0), x.stride(1), 1], [1, rows, columns], 128)


def number_tiles(x: Tensor) -> TensorDescriptor:
    """The 4 x 64 numbers of every chunk, one tile each."""
    return _tiles(x, [x.numel()], [1], [256], 0)


def _tiles(x: Tensor, shape: list[int], strides: list[int], tile: list[int], swizzle: int) -> TensorDescriptor:
    """A descriptor without the checks of its class, which cost as much as a launch: all of them hold for the above."""
    made: TensorDescriptor = object.__new__(TensorDescriptor)
    layout = _layout(swizzle, 8 * x.element_size(), len(shape))
    made.__dict__.update(base=x, shape=shape, strides=strides, block_shape=tile, layout=layout, padding="zero")
    return made


@lru_cache
def _layout(swizzle: int, bits: int, rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)
