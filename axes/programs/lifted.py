"""Constants of a program as numbers of the step, so that tuples which differ in them alone share one kernel.

A hyperparameter that is scheduled, a momentum say, changes a constant of the program in every step; a kernel with the
constant in its text would have to be compiled in every step.
"""

from __future__ import annotations

from dataclasses import replace

from axes.programs.program import Program, Value

_LINEAR = frozenset({"mul", "add", "sub"})  # elsewhere a constant may choose the form of an operation, a root say


def lifted(program: Program) -> tuple[Program, dict[str, float]]:
    """The program with constant factors and summands as 0-d inputs, and the values of these by name.

    Results are the same bits: a constant is rounded to the dtype of the entries where a number is.
    """
    constants: dict[str, float] = {}
    out = Program(nonnegative=program.nonnegative, positive=program.positive, extents=program.extents)
    inputs = [i for i, op in enumerate(program.operations) if op.name == "input"]
    where: dict[int, int] = {}
    for i in inputs:
        where[i] = out.add("input", (), program.operations[i].shaped)
        out.names[where[i]] = program.names[i]
    rest = [(i, op) for i, op in enumerate(program.operations) if op.name != "input"]
    places: dict[tuple[int, int], int] = {}  # of the new input: by operation, and by place among its operands
    for i, op in rest:
        for k, x in enumerate(op.inputs):
            if op.name in _LINEAR and isinstance(x, float) and x not in (-1.0, 0.0, 1.0):
                name = f"constant {len(constants)}"
                constants[name] = x
                places[i, k] = out.add("input", (), False)
                out.names[places[i, k]] = name
    for i, op in rest:

        def moved(k: int, x: Value, i: int = i) -> Value:
            return places.get((i, k), where[x] if isinstance(x, int) else x)

        out.operations.append(replace(op, inputs=tuple(moved(k, x) for k, x in enumerate(op.inputs))))
        where[i] = len(out.operations) - 1
    out.outputs = {n: where[v] if isinstance(v, int) else v for n, v in program.outputs.items()}
    out.positive |= {name for name, x in constants.items() if x > 0}  # as it was read off them
    return out, constants


__all__ = ["lifted"]
