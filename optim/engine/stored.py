"""States in the forms they are stored in. A stored state describes itself, by its names and dtypes.

`via.0.theta` in a form of 8 bits has its units beside it under `via.0.theta.unit`; a bfloat16 parameter with exact or
24-bit weights has their further bits under `parameter.low`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from axes.programs.program import PARAMETER
from axes.programs.storage import FORMS, LOW, UNIT, philox, stochastic_bfloat16

_SPLIT = {torch.int16: "split-16", torch.int8: "split-8"}
_CODES = {torch.int8: "signed-8", torch.uint8: "root-8"}


def begin(flat: dict[str, Tensor], forms: Mapping[str, str], parameter: Tensor) -> dict[str, Tensor]:
    """A first state in its stored forms."""
    out = dict(flat)
    if PARAMETER in forms:
        dtype = FORMS[forms[PARAMETER]].parts[1][1]
        out[PARAMETER + LOW] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
    for name, form in forms.items():
        if name != PARAMETER:
            code, unit = FORMS[form].encode(flat[name].reshape(-1), None)
            out[name], out[name + UNIT] = code.view(flat[name].shape), unit
    return out


def forms_of(flat: Mapping[str, Tensor]) -> dict[str, str]:
    """The forms that a state was stored in."""
    forms = {n[: -len(UNIT)]: _CODES[flat[n[: -len(UNIT)]].dtype] for n in flat if n.endswith(UNIT)}
    if PARAMETER + LOW in flat:
        forms[PARAMETER] = _SPLIT[flat[PARAMETER + LOW].dtype]
    return forms


def opened(flat: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A state as the rule sees it."""
    forms = forms_of(flat)
    if not forms:
        return flat
    out = {n: x for n, x in flat.items() if not n.endswith((UNIT, LOW))}
    for name, form in forms.items():
        if name != PARAMETER:
            out[name] = FORMS[form].decode(flat[name].reshape(-1), flat[name + UNIT]).view(flat[name].shape)
    return out


def weights(parameter: Tensor, flat: Mapping[str, Tensor]) -> Tensor:
    """The exact weights that a bfloat16 parameter and its state stand for, else the parameter."""
    low = flat.get(PARAMETER + LOW)
    if low is None:
        return parameter
    return FORMS[_SPLIT[low.dtype]].decode(parameter.detach().contiguous(), low)


def closed(flat: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state that the rule has left, in the forms of the one that was kept before."""
    forms = forms_of(kept)
    out = dict(flat)
    for name, form in forms.items():
        if name != PARAMETER and name in flat:
            code, unit = FORMS[form].encode(flat[name].reshape(-1), None)
            out[name], out[name + UNIT] = code.view(flat[name].shape), unit
    return out


def write(
    parameter: Tensor, value: Tensor, flat: Mapping[str, Tensor], random: tuple[Tensor | int, int, int] | None
) -> None:
    """Weights into a parameter and its further bits, in place. random: step, stream and seed, to round at random."""
    word = None
    if random is not None:
        place = torch.arange(parameter.numel(), device=parameter.device).view(parameter.shape)
        word = philox(place, *random)
    low = flat.get(PARAMETER + LOW)
    if low is not None:
        high, rest = FORMS[_SPLIT[low.dtype]].encode(value, word)
        parameter.copy_(high)
        low.copy_(rest)
    elif word is not None:
        parameter.copy_(stochastic_bfloat16(value, word))
    else:
        parameter.copy_(value)
