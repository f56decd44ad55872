"""A schedule's operations as one loop of C over lists of tensors on a CPU: memory is passed once, and nothing waits for
the host between two operations. And a loop that looks whether numbers are finite, alone or ahead of a step in one call.

The loop does what torch's multi-tensor operations do, in their order. The numbers of a step are made in float64 and are
arguments, so that schedules compile nothing. Every operation on entries is rounded once, and a product and a sum are
two, whatever the processor; what torch has as one operation for a whole program, or does by fused multiplications,
differs from it by such roundings. Entries are shared out among threads; each is for itself, so that bits do not depend
on their number. The threads are those of torch's OpenMP, which wait for work already: to begin one takes 50 us or more.
A child process has none of them, and begins its own.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, final

import numpy
import torch

from axes.programs import c_library
from axes.programs.batched import Schedule
from axes.programs.c_text import CODE, Real, functions

REALS: Mapping[torch.dtype, Real] = {torch.float32: "float", torch.float64: "double"}
SHORT = torch.bfloat16  # what lists may be in besides: read as it is, and rounded to when it is written
_SHARE = 1 << 16  # entries that are worth another thread: to wake one takes as long as some 10,000 of them
_POOL = [True]  # whether torch's threads are there: a process that was forked has lost them, and would wait for ever
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _POOL.__setitem__(0, False))
OPTIONS = ("-ffp-contract=off", "-pthread")

# what schedules do besides operations of programs, and what torch does otherwise on tiles
_CODE = {
    "scale": "{0} * {1}", "mix": "{0} * {2} + {1} * {3}", "add": "{0} + {1} * {2}", "plus": "{0} + {1} * {2}",
    "add number": "{0} + {1}", "addcmul": "{0} + {3} * {1} * {2}", "addcdiv": "{0} + {3} * {1} / {2}",
    "copy": "{1}", "times": "{0} * {1}", "over": "{0} / {1}", "div": "{0} / {1}",
    "clamp": "least(largest({0}, {1}), {2})", "sign": "({0} > 0) - ({0} < 0)", "truth": "{0}",
}  # fmt: skip
# torch has these for many entries at once, C for one after another
_SLOW = frozenset({"exp", "log", "log1p", "expm1", "sinh", "asinh", "tanh", "pow"})

_FUNCTION = "static long {name}(void *const *tensors, long count, long first, long end, const double *numbers) {{"
_WALK = """\
#include <pthread.h>
#include <stdint.h>
typedef struct {{
    void *const *tensors;
    const long *starts;
    const double *numbers;
    long count, first, end, found, parts, looks;
}} part;
/* a look takes the last tensor first: a step begins with what is left in a core's own cache */
static void *walk(void *given) {{
    part *const x = given;
    for (long k = 0; k < x->count; k++) {{
        const long i = x->looks ? x->count - 1 - k : k, start = x->starts[i];
        const long first = x->first > start ? x->first - start : 0;
        const long end = (x->end < x->starts[i + 1] ? x->end : x->starts[i + 1]) - start;
        if (first < end) x->found |= {pass}(x->tensors + i, x->count, first, end, x->numbers);
    }}
    return NULL;
}}
/* of the OpenMP that torch has loaded; none where its threads are others */
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
extern int omp_get_thread_num(void) __attribute__((weak));
extern int omp_get_num_threads(void) __attribute__((weak));
static void share(void *given) {{
    part *const parts = given;
    const long step = omp_get_num_threads();
    for (long i = omp_get_thread_num(); i < parts->parts; i += step) walk(&parts[i]);
}}
static void begin(part *parts) {{
    const long count = parts->parts;
    pthread_t others[count];
    int begun[count];
    for (long i = count - 1; i >= 0; i--) {{
        begun[i] = i > 0 && pthread_create(&others[i], NULL, walk, &parts[i]) == 0;
        if (!begun[i]) walk(&parts[i]);
    }}
    for (long i = 0; i < count; i++)
        if (begun[i]) pthread_join(others[i], NULL);
}}
int lists(void *const *tensors, const long *starts, const double *numbers, long count, long threads, int pool,
          int passes) {{
    part parts[threads];
    for (long looks = 1; looks >= 0; looks--) {{
        if (!(passes & (looks ? {LOOK} : {STEP}))) continue;
        for (long i = 0; i < threads; i++) {{
            const long first = starts[count] * i / threads, end = starts[count] * (i + 1) / threads;
            parts[i] = (part){{tensors, starts, numbers, count, first, end, 0, threads, looks}};
        }}
        /* all threads, whatever the parts: a pool that is asked for fewer ends the others */
        if (threads == 1) walk(parts);
        else if (pool && GOMP_parallel && omp_get_thread_num && omp_get_num_threads) GOMP_parallel(share, parts, 0, 0);
        else begin(parts);
        for (long i = 0; i < threads; i++)
            if (parts[i].found) return 1;
    }}
    return 0;
}}
"""
_SHORTS = """\
#include <stdint.h>
static inline real from_short(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float made;
    memcpy(&made, &bits, 4);
    return made;
}
static inline uint16_t to_short(real x) {
    const float given = x;
    uint32_t bits;
    memcpy(&bits, &given, 4);
    return given != given ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
"""
LOOK, STEP = 1, 2  # what a call does: both, a step only if the look has found nothing
# Adding one to the largest exponent carries into the sign. Four places are read at once: one alone waits for memory.
_LOOK = """\
    const uint{bits}_t *const x = tensors[{row} * count];
    const uint{bits}_t one = (uint{bits}_t)1 << {fraction}, all = (uint{bits}_t)-1 >> 1;
    const long part = (end - first) / 4 / 64 * 64;
    uint{bits}_t found = 0;
    for (long i = first; i < first + part; i += 64) {{
        #pragma omp simd reduction(|: found)
        for (long j = i; j < i + 64; j++) {{
            found |= (x[j] & all) + one;
            found |= (x[j + part] & all) + one;
            found |= (x[j + 2 * part] & all) + one;
            found |= (x[j + 3 * part] & all) + one;
        }}
    }}
    for (long i = first + 4 * part; i < end; i++) found |= (x[i] & all) + one;
    return found >> {last};
}}
"""
_LAYOUT: Mapping[Real, tuple[int, int]] = {"float": (32, 23), "double": (64, 52)}  # bits, and those of the fraction


def no_loop(schedule: Schedule) -> str | None:
    """Why a schedule is no loop, or None if it is one."""
    for step in schedule.steps:
        name = step.name.rpartition(" ")[0] if step.name not in _CODE else step.name
        if name == "pow" and _constant(step.numbers) == 0.5:
            continue
        if name in _SLOW:
            return f"{name} of many entries at once is torch's"
        if name not in _CODE and name not in CODE:
            return f"{step.name} takes entries together"
    return None


def source(schedule: Schedule, real: Real, short: Collection[str] = (), looked: str | None = None) -> str:
    """The text of a schedule's function. short: lists of bfloat16, by name. looked: the list that can be looked at."""
    inputs, shorts = len(schedule.names), [name in short for name in schedule.names]
    moved = {step.target for step in schedule.steps}
    written = [k for k, name in enumerate(schedule.names) if k in moved and name in schedule.program.outputs]
    look = [] if looked is None else [_look(real, schedule.names.index(looked))]
    lines = [functions(real), _SHORTS, *look, _FUNCTION.format(name="entries")]
    lines += [f"    {'uint16_t' if shorts[k] else 'real'} *const p{k} = tensors[{k} * count];" for k in range(inputs)]
    body, numbers = [], 0
    for step in schedule.steps:
        given = [f"r{s}" for s in step.sources]
        name = step.name
        if name not in _CODE:
            name, pattern = name.rsplit(" ", 1)
            shaped, rest = iter(given), iter(range(numbers, numbers + len(step.numbers)))
            given = [next(shaped) if letter == "x" else f"n{next(rest)}" for letter in pattern]
        else:
            given += [f"n{numbers + k}" for k in range(len(step.numbers))]
        if name == "pow":
            name = "sqrt"
        code = _CODE.get(name) or CODE[name]
        lines += [f"    const real n{numbers + k} = numbers[{numbers + k}];" for k in range(len(step.numbers))]
        numbers += len(step.numbers)
        body.append(f"        r{step.target} = {code.format(*given)};")
    own = ", ".join(f"r{r}" for r in range(inputs, schedule.registers))
    lines += ["    #pragma omp simd", "    for (long i = first; i < end; i++) {"]
    lines += [f"        real r{k} = {f'from_short(p{k}[i])' if shorts[k] else f'p{k}[i]'};" for k in range(inputs)]
    lines += [f"        real {own};"] if own else []
    body += [f"        p{k}[i] = {f'to_short(r{k})' if shorts[k] else f'r{k}'};" for k in written]
    lines += [*body, "    }", "    return 0;", "}"]
    return "\n".join([*lines, _walk("entries", "entries" if looked is None else "look")])


def look_source(real: Real) -> str:
    """The text of a function that finds a number that is not finite."""
    return "\n".join(["#include <stdint.h>", _look(real, 0), _walk("look", "look")])


def _look(real: Real, row: int) -> str:
    bits, fraction = _LAYOUT[real]
    return _FUNCTION.format(name="look") + "\n" + _LOOK.format(bits=bits, fraction=fraction, last=bits - 1, row=row)


def _walk(step: str, look: str) -> str:
    """What shares entries out. step, look: the functions that a step and a look are."""
    passes = step if step == look else f"(x->looks ? {look} : {step})"
    return _WALK.format(LOOK=LOOK, STEP=STEP, **{"pass": passes})


def _constant(numbers: Sequence[Any]) -> float | None:
    """What a step is given besides entries if it is the same at every step."""
    ((factors, over, negative),) = numbers
    plain = len(factors) == 1 and not over and not negative and isinstance(factors[0], float)
    return factors[0] if plain else None


@final
class Loop:
    """A function of a text, over lists of contiguous tensors of the same sizes."""

    def __init__(self, text: str, sizes: Sequence[int], rows: int, numbers: int = 0) -> None:
        """rows: lists. numbers: that it is given."""
        self.function = c_library.library(text, *OPTIONS)["lists"]
        self.function.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_long] * 2, *[ctypes.c_int] * 2]
        self.function.restype = ctypes.c_int
        self.count, self.total, self.numbers = len(sizes), sum(sizes), numbers
        self._starts = numpy.array([0, *accumulate(sizes)], dtype=numpy.int64)
        self._tensors = numpy.zeros((rows, self.count), dtype=numpy.int64)
        self._values = numpy.zeros(numbers)
        self._last: list[list[int]] = [[]] * rows
        self._given = (*(x.ctypes.data for x in (self._tensors, self._starts, self._values)), self.count)
        self._worth = max(1, self.total // _SHARE)

    def put(self, row: int, places: list[int]) -> None:
        """Where the tensors of a list are."""
        if places != self._last[row]:
            self._tensors[row], self._last[row] = places, places

    def give(self, numbers: Sequence[float]) -> None:
        """The numbers of a step, until there are others."""
        self._values[:] = numbers

    def __call__(self, passes: int = STEP) -> bool:
        """Whether it has found something. passes: LOOK, STEP or both, where a look that finds something is all."""
        return bool(self.function(*self._given, min(torch.get_num_threads(), self._worth), _POOL[0], passes))


__all__ = ["LOOK", "OPTIONS", "REALS", "SHORT", "STEP", "Loop", "look_source", "no_loop", "source"]
