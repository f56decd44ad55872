"""Gradients that are not finite: found before anything changes.

The host looks at them, and raises or leaves the step out. Where a step must not wait for the device it is flags there
that call the step off: kernels read them, and what else has moved is put back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from axes.errors import NotFiniteError
from axes.optim.engine import loops
from axes.optim.engine.gradients import Gradients
from axes.optim.engine.options import FiniteCheck
from axes.optim.engine.together import uncompiled
from axes.programs import c_library
from axes.programs.c_entries import LOOK, REALS, Loop, look_source

_SMALL = 8192  # entries of a gradient that is copied to its like in less time than an operation of its own takes
Agree = Callable[[bool | Tensor], bool]  # whether any process says so


@final
class Finite:
    """What an optimizer does about gradients that are not finite, and how often it did.

    check: "raise", "skip", or None to do nothing unless a gradient scaler says so.
    """

    def __init__(self, check: FiniteCheck, skipped: int = 0) -> None:
        self.check = check
        self._look = Look()
        self.flags: dict[torch.device, Tensor] = {}  # of the step under way: not 0 where it must not happen
        self.skipped_here = skipped  # by the host
        self._skipped_there: dict[torch.device, Tensor] = {}  # by flags

    @property
    def skipped(self) -> int:
        """Steps that were left out."""
        return self.skipped_here + sum(int(x) for x in self._skipped_there.values())

    def calls_off(
        self,
        who: str,
        gradients: list[Tensor],
        name: Callable[[int], str],
        given: Tensor | None,
        there: bool,
        agree: Agree | None,
    ) -> bool:
        """Whether the host leaves this step out; if it does not look itself, the flags of the step are set.

        who, name: what messages call the optimizer, and the parameter of a gradient.
        given: the flag of a gradient scaler.
        there: some group's step must not wait for the device.
        agree: set where parameters are spread over processes.

        Raises:
            NotFiniteError: a gradient has a NaN or an infinity, and check is "raise".
        """
        self.flags = self._on_devices(gradients, given, there) if gradients and agree is None else {}
        if agree is not None and given is not None and agree(bool(given)):
            self.skipped_here += 1
            return True
        if self.check is None or self.flags or not (gradients or agree):
            return False
        bad = self._not_finite(gradients, name, agree or bool)
        if bad is None:
            return False
        if self.check != "skip":
            raise NotFiniteError(f"{who}: the gradient of {bad} is not finite; no parameter was changed")
        self.skipped_here += 1
        return True

    def _not_finite(self, gradients: list[Tensor], name: Callable[[int], str], agree: Agree) -> str | None:
        """Whose gradient is not finite, of any process."""
        if not agree(self._look.doubtful(gradients)):
            return None
        bad = next((name(i) for i, g in enumerate(gradients) if not bool(torch.isfinite(g).all())), None)
        return (bad or "a parameter, on another process,") if agree(bad is not None) else None

    def _on_devices(self, gradients: list[Tensor], given: Tensor | None, there: bool) -> dict[torch.device, Tensor]:
        """Flags on the devices of gradients; none where the host looks itself."""
        found = {} if given is None else {given.device: given}
        if self.check == "skip" and there:
            own = 1.0 - torch.isfinite(_together(torch._foreach_norm(gradients, torch.inf))).all().to(torch.float32)
            found = {own.device: own if given is None else torch.maximum(own, given.to(own.device))}
        for flag in found.values():
            held = self._skipped_there.setdefault(flag.device, torch.zeros((), dtype=torch.int64, device=flag.device))
            held.add_(flag != 0)
        return found

    def flag(self, device: torch.device) -> Tensor | None:
        """The flag of this step, on a device."""
        if self.flags and device not in self.flags:
            self.flags[device] = next(iter(self.flags.values())).to(device)
        return self.flags.get(device)

    @uncompiled()
    def put_back(self, before: Sequence[Before], states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Undo the step of these parameters where its flag says so."""
        for past in before:
            flag = self.flag(past.parameter.device)
            assert flag is not None
            past.parameter.copy_(torch.where(flag != 0, past.value, past.parameter))
            for name, old in past.state.items():
                now = states[past.parameter][name]
                now.copy_(torch.where(flag.to(now.device) != 0, old.to(now.device), now))


@final
class Before:
    """A parameter and its state before a step."""

    def __init__(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        self.parameter, self.value = parameter, parameter.clone()
        self.state = {name: x.clone() for name, x in state.items()}


@final
class Look:
    """A number for each gradient, or for several small ones; which are summed as one is kept while shapes stay."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._large: list[int] = []
        self._small: list[Callable[[Sequence[Tensor]], tuple[Tensor, ...]]] = []  # choose those of one shape
        self._total, self._seen = 0, 0  # entries, and those of all looks
        self._loops: dict[torch.dtype, Loop | None] = {}

    def doubtful(self, gradients: Sequence[Tensor]) -> bool | Tensor:
        """Whether it is open that all entries are finite: the numbers say so, or they overflow where no entry does.

        On a device it is a tensor, which nobody has waited for; a GPU computes all norms in one launch. On a CPU they
        are sums: no addition makes a finite number of one that is not, so none is missed. For 20 gradients of 210 x 210
        they take 77 us, of which 40 are the reading; inner products take 96, a gradient scaler's check 115, sums of
        squares 122 and norms 129 in one call for all (and largest entries, 117, miss -inf). A loop of C that compares
        exponents leaves nothing open.
        """
        gradients = Gradients.of(gradients)
        if not gradients.on_cpu:
            norms = _together(torch._foreach_norm(list(gradients)))
            norm = norms.sum(dtype=torch.promote_types(norms.dtype, torch.float32))
            return (norm - norm).ne(0)  # NaN differs from 0 as well
        sizes = gradients.sizes
        if sizes != self._sizes:
            self._sort(gradients, sizes)
        found = self._found(gradients)
        if found is not None:
            return found
        sums = [gradients[i].sum() for i in self._large]
        try:
            sums += [torch.cat(chosen(gradients)).sum() for chosen in self._small]
        except RuntimeError:  # as many entries as those before, in other shapes
            self._sort(gradients, sizes)
            sums += [torch.cat(chosen(gradients)).sum() for chosen in self._small]
        total = sum(map(Tensor.item, sums))
        return not bool(total - total == 0)  # complex numbers too

    def _found(self, gradients: Gradients) -> bool | None:
        """Whether some entry is not finite, by a loop of C; None where there is none yet."""
        self._seen += self._total
        if self._seen - self._total < loops.WORTH or c_library.followed():
            return None
        dtype = gradients[0].dtype
        if gradients.dtypes != {dtype} or dtype not in REALS or not gradients.readable:
            return None
        if dtype not in self._loops:
            fits = loops.no_loops(gradients[0].device, dtype, self._seen) is None
            self._loops[dtype] = loops.loop(look_source(REALS[dtype]), self._sizes, 1) if fits else None
        look = self._loops[dtype]
        if look is None:
            return None
        look.put(0, gradients.places)
        return look(LOOK)

    def _sort(self, gradients: Sequence[Tensor], sizes: list[int]) -> None:
        """Which gradients are added up alone, and which behind one another."""
        alike: dict[tuple[Any, ...], list[int]] = {}
        for i, g in enumerate(gradients):
            if sizes[i] <= _SMALL and g.ndim:
                alike.setdefault((g.dtype, *g.shape[1:]), []).append(i)
        together = [some for some in alike.values() if len(some) > 1]
        self._total, self._loops = sum(sizes), {}
        self._sizes, self._small = sizes, [operator.itemgetter(*some) for some in together]
        # the first last: the step begins with what a core's cache still has
        self._large = sorted(set(range(len(sizes))) - {i for some in together for i in some})[::-1]


def _together(numbers: Sequence[Tensor]) -> Tensor:
    """0-d tensors as one, wherever and in whatever dtype they are."""
    if len({(x.device, x.dtype) for x in numbers}) > 1:
        numbers = [x.to(numbers[0].device, torch.float32) for x in numbers]
    return torch.stack(list(numbers))
