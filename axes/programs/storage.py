"""How the numbers of a step are kept between steps: forms that take fewer bytes than float32, exact or rounded.

    plain     the tensor itself
    split-16  float32 as a bfloat16 tensor and the 16 bits that it lacks: exact
    split-8   float32 rounded to 24 bits, as a bfloat16 tensor and 8 more bits
    signed-8  a sign and the root of |x| / max |x| in 7 bits, one float32 unit for every 256 entries
    root-8    for x >= 0: the fourth root of x / max x in 8 bits, one float32 unit for every 256 entries

A form has one stored tensor for every part, named by the suffix; `encode` and `decode` are what a kernel does in
registers (`axes.kernels.common.codes`), bit for bit. The bfloat16 of a split form is the number rounded to nearest,
ties away from zero. In the 8-bit forms a positive number never becomes zero, so that a root in a denominator stays what
it was, and a block with a number that is not finite decodes to numbers that are not: nothing is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

QUANTUM = 256  # entries that share a unit
SMALLEST = 7.52316384526264e-37  # unit of a block of zeros: 2^-120, so that what a step makes of it is a normal float32
LOW, UNIT = ".low", ".unit"


@final
@dataclass(frozen=True)
class Form:
    """A stored form of float32 numbers.

    parts: (suffix, dtype) of its tensors, the first in the shape of the numbers; a part UNIT has one entry a block.
    encode: flat float32 numbers, and for rounded forms random bits or None, to the flat parts; decode: the inverse.
    bytes: of one number.
    """

    parts: tuple[tuple[str, torch.dtype | None], ...]
    encode: Callable[[Tensor, Tensor | None], tuple[Tensor, ...]]
    decode: Callable[..., Tensor]
    bytes: float


def _bits(x: Tensor) -> Tensor:
    """The bits of float32 numbers; what is no number has the usual ones, so that no rounding can overflow."""
    return torch.where(x == x, x, torch.nan).contiguous().view(torch.int32)


def _high(bits: Tensor) -> Tensor:
    """bfloat16 numbers from the upper halves of int32."""
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def _join_16(high: Tensor, low: Tensor) -> Tensor:
    return ((high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


def _cut_16(x: Tensor, random: Tensor | None) -> tuple[Tensor, ...]:
    bits = _bits(x)
    low = bits.to(torch.int16)
    return _high(bits - low.to(torch.int32)), low


def _join_8(high: Tensor, low: Tensor) -> Tensor:
    return ((high.view(torch.int16).to(torch.int32) << 16) + (low.to(torch.int32) << 8)).view(torch.float32)


def _cut_8(x: Tensor, random: Tensor | None) -> tuple[Tensor, ...]:
    up = 0x80 if random is None else (random & 0xFF).to(torch.int32)
    bits = (_bits(x) + up) >> 8
    low = bits.to(torch.int8)
    return _high((bits - low.to(torch.int32)) << 8), low


def _plain(x: Tensor, random: Tensor | None) -> tuple[Tensor, ...]:
    return (x,)


def stochastic_bfloat16(x: Tensor, random: Tensor) -> Tensor:
    """float32 rounded to one of the two bfloat16 around it, to each with probability one minus the distance."""
    return _high(_bits(x) + (random & 0xFFFF).to(torch.int32))


def _blocks(x: Tensor) -> Tensor:
    """(blocks, QUANTUM), padded with zeros."""
    missing = -x.numel() % QUANTUM
    return torch.nn.functional.pad(x, (0, missing)).view(-1, QUANTUM)


def _unit(x: Tensor, levels: float) -> Tensor:
    largest = torch.where(x == x, x.abs(), torch.inf).amax(1)
    return (largest * (1.0 / levels)).clamp_min(SMALLEST)


def _encode_signed(x: Tensor, random: Tensor | None) -> tuple[Tensor, ...]:
    blocks = _blocks(x)
    unit = _unit(blocks, 127.0**2)
    size = (blocks.abs() * (1.0 / unit)[:, None]).sqrt().round()
    return torch.where(blocks < 0, -size, size).to(torch.int8).view(-1)[: x.numel()], unit


def _decode_signed(code: Tensor, unit: Tensor) -> Tensor:
    c = _blocks(code.to(torch.float32))
    return (c * c.abs() * unit[:, None]).view(-1)[: code.numel()]


def _encode_root(x: Tensor, random: Tensor | None) -> tuple[Tensor, ...]:
    blocks = _blocks(x)
    unit = _unit(blocks, 255.0**4)
    size = (blocks * (1.0 / unit)[:, None]).sqrt().sqrt().round()
    return torch.where(blocks > 0, size.clamp_min(1.0), 0.0).to(torch.uint8).view(-1)[: x.numel()], unit


def _decode_root(code: Tensor, unit: Tensor) -> Tensor:
    c = _blocks(code.to(torch.float32))
    c = c * c
    return (c * c * unit[:, None]).view(-1)[: code.numel()]


FORMS: Mapping[str, Form] = {
    "plain": Form((("", None),), _plain, lambda x: x, 4),
    "split-16": Form((("", torch.bfloat16), (LOW, torch.int16)), _cut_16, _join_16, 4),
    "split-8": Form((("", torch.bfloat16), (LOW, torch.int8)), _cut_8, _join_8, 3),
    "signed-8": Form((("", torch.int8), (UNIT, torch.float32)), _encode_signed, _decode_signed, 1 + 4 / QUANTUM),
    "root-8": Form((("", torch.uint8), (UNIT, torch.float32)), _encode_root, _decode_root, 1 + 4 / QUANTUM),
}


# ---- random bits -----------------------------------------------------------------------------------------------------

_ROUNDS = 7  # the fewest of Philox4x32 that pass the usual statistical tests
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox(place: Tensor, step: Tensor | int, stream: int, seed: int) -> Tensor:
    """Random 32-bit words, one for every place: the first word of Philox4x32 with 7 rounds.

    place: int64, the entry; step: how many data were seen; stream: which tensor; seed: 64 bits. The counter is (place,
    place >> 32, step, stream): a number depends on nothing but these, and a resumed run draws what an uninterrupted one
    does.

    Source: Salmon, Moraes, Dror, Shaw 2011, section 4.3.
    """
    step = torch.as_tensor(step, dtype=torch.int64, device=place.device)
    c = [place & _MASK, (place >> 32) & _MASK, (step & _MASK).expand_as(place), torch.full_like(place, stream & _MASK)]
    key = [seed & _MASK, (seed >> 32) & _MASK]
    for _ in range(_ROUNDS):
        first, second = c[0] * _MULTIPLIERS[0], c[2] * _MULTIPLIERS[1]  # modulo 2^64, so the upper halves are right
        c = [
            ((second >> 32) & _MASK) ^ c[1] ^ key[0],
            second & _MASK,
            ((first >> 32) & _MASK) ^ c[3] ^ key[1],
            first & _MASK,
        ]
        key = [(k + w) & _MASK for k, w in zip(key, _WEYL, strict=True)]
    return c[0]
