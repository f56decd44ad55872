"""Triton's interpreter without what it works out again at every operation: the same arithmetic in a fifth of the time.

It is numpy between Python objects, and most of its time went into these objects: types of blocks and shapes made anew
for every operation, the whole language patched again at every call of a function, every sum of integers widened to see
whether it overflows, which no test's size does. `patch` keeps them. What numpy computes is left alone.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests import quicker_operators


def patch() -> None:
    """Once for a process, which interprets from then on."""
    from triton.runtime import interpreter

    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    _types_are_kept()
    _shapes_are_compared()
    _values_are_themselves()
    _dtypes_are_known(interpreter)
    _handles_are_made(interpreter)
    _numbers_are_kept(interpreter)
    _language_stays_patched(interpreter)
    quicker_operators.patch(interpreter, interpreter.interpreter_semantic)


def _types_are_kept() -> None:
    """One object for every type of a block, and one shape for all tensors of a type; nobody writes into either."""
    from triton.language import core

    made: dict[Any, Any] = {}
    new, init, tensor = object.__new__, core.block_type.__init__, core.tensor.__init__

    def block(cls: Any, element_ty: Any = None, shape: Any = ()) -> Any:
        key = element_ty.name, getattr(element_ty, "address_space", 1), *shape
        if key not in made:
            made[key] = new(cls)
        return made[key]

    def once(self: Any, element_ty: Any, shape: Any) -> None:
        if "name" not in vars(self):  # set last: a shape that is refused is refused every time
            init(self, element_ty, shape)

    def shaped(self: Any, handle: Any, type: Any) -> None:
        known = vars(type).get("of_tensors")
        if known is None:
            tensor(self, handle, type)
            type.of_tensors = {name: x for name, x in vars(self).items() if name != "handle"}
        else:
            vars(self).update(known)
            self.handle = handle

    core.block_type.__new__ = block
    core.block_type.__init__ = once
    core.tensor.__init__ = shaped


def _shapes_are_compared() -> None:
    """Without making a tuple, and its type, of what a tuple is compared with; alike, they are not compared by sides."""
    from triton.language import core, semantic

    plain, unwrap = core.tuple.__eq__, core._unwrap_if_constexpr

    def equal(self: Any, other: Any) -> Any:
        values = getattr(other, "values", other)
        if type(values) is not list:
            return plain(self, other)
        return core.constexpr(self.values == [unwrap(x) for x in values])

    core.tuple.__eq__ = equal

    together = semantic.TritonSemantic.broadcast_impl_value

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        alike = a is b or a.is_block() == b.is_block() and (not a.is_block() or a.shape.values == b.shape.values)
        return (lhs, rhs) if alike else together(self, lhs, rhs)

    semantic.TritonSemantic.broadcast_impl_value = broadcast
    checked, div_or_mod = semantic.TritonSemantic.binary_op_type_checking_impl, "div_or_mod"

    def operands(self: Any, lhs: Any, rhs: Any, *more: Any, **given: Any) -> Any:
        same = type(lhs) is type(rhs) is core.tensor and lhs.type is rhs.type and not lhs.type.scalar.is_ptr()
        if same and len(more) < 4 and not given.get(div_or_mod):  # of halves that are divided comes float32
            return lhs, rhs
        return checked(self, lhs, rhs, *more, **given)

    semantic.TritonSemantic.binary_op_type_checking_impl = operands


def _values_are_themselves() -> None:
    """A constant or a tensor is not looked through for what it is not."""
    from triton.language import core

    plain = core._unwrap_if_constexpr
    themselves = {int, float, bool, str, type(None), core.dtype, core.block_type, core.pointer_type, core.tensor}

    def unwrapped(x: Any) -> Any:
        return x if type(x) in themselves else plain(x)

    core._unwrap_if_constexpr = unwrapped


def _dtypes_are_known(interpreter: Any) -> None:
    known: dict[str, Any] = {}
    plain: Callable[[Any], Any] = interpreter._get_np_dtype

    def numpys(of: Any) -> Any:
        if of.name not in known:
            known[of.name] = plain(of)
        return known[of.name]

    interpreter._get_np_dtype = numpys


def _handles_are_made(interpreter: Any) -> None:
    """Without a look at what numpy made, which is of the size that it was asked for."""

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    interpreter.TensorHandle.__init__ = init

    def splat(self: Any, of: Any, arg: Any) -> Any:
        data = np.empty(of.shape, interpreter._get_np_dtype(arg.dtype))
        data[...] = arg.data[0] if arg.data.ndim else arg.data
        return interpreter.TensorHandle(data, arg.dtype.scalar)

    interpreter.InterpreterBuilder.create_splat = splat


def _numbers_are_kept(interpreter: Any) -> None:
    """A number that is assigned or compared is one tensor for all times, into which nobody writes."""
    from triton.language import core

    made: dict[Any, Any] = {}
    of = type(interpreter.interpreter_semantic)
    plain, tensor = of.to_tensor, core.tensor

    def kept(self: Any, x: Any, check_type: bool = True) -> Any:
        kind = type(x)
        if kind is tensor:
            return x
        if kind not in (int, float, bool):
            return plain(self, x, check_type)
        key = kind, x
        if key not in made:
            if len(made) > 1000:  # numbers that are computed
                return plain(self, x, check_type)
            made[key] = plain(self, x, check_type)
        return made[key]

    of.to_tensor = kept


def _language_stays_patched(interpreter: Any) -> None:
    """Nothing else is done with it in this process: patched once for those of its modules that a function sees."""
    import triton.language as tl

    done: set[frozenset[int]] = set()
    plain, nothing = interpreter._patch_lang, interpreter._LangPatchScope()

    @cache
    def names(of: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(of) if tl.core.is_builtin(member)]

    @cache
    def sees(fn: Any) -> frozenset[int]:
        return frozenset(id(x) for x in fn.__globals__.values() if x is tl or x is tl.core)

    def once(fn: Any) -> Any:
        if not sees(fn) or sees(fn) not in done:
            plain(fn)
            done.add(sees(fn))
        return nothing

    semantic = interpreter.interpreter_semantic

    def replaced(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        of = getattr(member, "__wrapped__", member)  # which asks for what it is given here

        def called(*args: Any, **given: Any) -> Any:
            given["_semantic"] = semantic
            return of(*args, **given)

        scope.set_attr(obj, name, called)

    interpreter._patch_lang, interpreter._patch_attr = once, replaced
    interpreter.inspect = SimpleNamespace(**vars(inspect))
    interpreter.inspect.getsourcelines = _lines
    interpreter.FunctionRewriter._get_jit_fn_file_line = lambda self: _definition(self.fn)
    interpreter.inspect.getmembers = lambda of: [(name, getattr(of, name)) for name in names(of)]


def _lines(of: Any) -> tuple[list[str], int]:
    """inspect.getsourcelines of a function, whose file is parsed once."""
    code = of.__code__
    lines, ends = _file(code.co_filename)
    first = code.co_firstlineno
    return lines[first - 1 : ends[first]], first


def _definition(of: Any) -> tuple[str, int]:
    """The file and the line of its def, below its decorators."""
    lines, first = _lines(of)
    return of.__code__.co_filename, first + next(n for n, line in enumerate(lines) if line.strip().startswith("def "))


@cache
def _file(name: str) -> tuple[list[str], dict[int, int | None]]:
    """Its lines, and where the function that begins at a line, with its decorators, ends."""
    lines = linecache.getlines(name)
    functions = [x for x in ast.walk(ast.parse("".join(lines))) if isinstance(x, ast.FunctionDef)]
    return lines, {min(d.lineno for d in (*x.decorator_list, x)): x.end_lineno for x in functions}
