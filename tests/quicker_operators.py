"""Operators of tensors in Triton's interpreter without its way to them: what it makes of two types is asked once.

x + y is seven calls of functions that look at types before numpy adds. What comes back follows from the operator, the
two types and, of a number, the number: the first of a kind takes Triton's way, and says what type it has; from then on
numpy is called at once. It broadcasts by itself, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

# By operator: numpy's function of floating points, and of integers.
_BOTH: dict[str, tuple[Any, Any]] = {
    "add": (np.add, np.add),
    "sub": (np.subtract, np.subtract),
    "mul": (np.multiply, np.multiply),
    "and": (None, np.bitwise_and),
    "or": (None, np.bitwise_or),
    "lt": (np.less, np.less),
    "le": (np.less_equal, np.less_equal),
    "gt": (np.greater, np.greater),
    "ge": (np.greater_equal, np.greater_equal),
    "eq": (np.equal, np.equal),
    "ne": (np.not_equal, np.not_equal),
}
_REVERSED = ("add", "sub", "mul")
_DIVIDED = {"fp32", "fp64"}  # halves are divided as float32


class _Known(NamedTuple):
    """What comes of two types, or of a type and a number."""

    numpys: Callable[[Any, Any], Any]
    other: Any  # the other's type, which lives as long as this; of a number None
    number: Any  # an array of one, of the tensor's own dtype
    bytes_each: int  # of an offset from a pointer; elsewhere 0
    dtype: Any  # of the handle, where the number stands first
    itemsize: int  # the most that its numbers may take
    numpys_dtype: Any
    type: Any


def patch(interpreter: Any, semantic: Any) -> None:
    """All operators of the class of tensors; those that find nothing known take the way of `semantic`."""
    from triton.language import core

    for name, numpys in [*_BOTH.items(), ("truediv", (np.divide, None))]:
        forms = [f"__{name}__", f"__r{name}__"] if name in _REVERSED else [f"__{name}__"]
        for form in forms:
            setattr(core.tensor, form, _operator(interpreter, semantic, core, form, *numpys))


def _operator(interpreter: Any, semantic: Any, core: Any, form: str, floats: Any, integers: Any) -> Callable[..., Any]:
    plain = getattr(core.tensor, form).__wrapped__
    tensor, handle = core.tensor, interpreter.TensorHandle
    turned = form.startswith("__r")

    def operator(self: Any, other: Any, _semantic: Any = None) -> Any:
        of = self.type
        try:
            table = of.operators[form]
        except AttributeError:
            of.operators = {form: (table := {})}
        except KeyError:
            table = of.operators[form] = {}
        if type(other) is tensor:
            theirs = other.type
            found = table.get(id(theirs))
        else:
            theirs = None
            found = table.get((type(other), other)) if type(other) in (int, float) else None
        if found is None or found.other is not theirs:
            y = plain(self, other, _semantic=semantic)
            learn(table, self, other, y)
            return y
        x, dtype = self.handle.data, found.dtype if turned else self.handle.dtype.scalar
        if found.bytes_each:
            data = x + found.bytes_each * other.handle.data.astype(np.uint64)
        else:
            z = other.handle.data if found.number is None else found.number
            data = found.numpys(z, x) if turned else found.numpys(x, z)
            if data.itemsize > found.itemsize:
                data = data.astype(found.numpys_dtype)
        return tensor(handle(data, dtype), found.type)

    def learn(table: dict[Any, Any], x: Any, other: Any, y: Any) -> None:
        """What is alike in all that follow; nothing, where it is more than numpy's function."""
        ours = x.type.scalar
        number, bytes_each, theirs = None, 0, None
        if type(other) is tensor:
            key: Any = id(other.type)
            theirs = other.type
            if form == "__add__" and ours.is_ptr():
                if not theirs.scalar.is_int_signed():
                    return
                bytes_each = max(1, ours.element_ty.primitive_bitwidth // 8)
            elif ours is not theirs.scalar:
                return
        elif type(other) in (int, float) and not ours.is_ptr():
            key = type(other), other
            _, constant = semantic.binary_op_type_checking_impl(x, other)
            if constant.dtype is not ours or len(table) > 1000:
                return
            number = constant.handle.data.reshape(-1)[:1].copy()
        else:
            return
        numpys = floats if ours.is_floating() else integers
        if not bytes_each and (numpys is None or form == "__truediv__" and ours.name not in _DIVIDED):
            return
        dtype = y.handle.dtype
        width = 8 if ours.is_ptr() else max(1, dtype.primitive_bitwidth // 8)
        cast = interpreter._get_np_dtype(dtype)
        table[key] = _Known(numpys, theirs, number, bytes_each, dtype, width, cast, y.type)

    return operator
