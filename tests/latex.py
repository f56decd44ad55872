r"""Lines of LaTeX as `axes.symbols` writes them, worked out: a small calculator that knows nothing of the package.

Products are by matrices where both sides are; a column is (d, 1). What it cannot read raises Unread.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Value = Any  # a tensor of two dimensions, a number, or a multiple of the identity
_TOKEN = re.compile(
    r"\s*(?P<number>\d+(\.\d+)?)|\s*(?P<macro>\\[a-zA-Z]+|\\[,;!{}|\\ ])|\s*(?P<letter>[A-Za-z])|\s*(?P<sign>.)", re.S
)
_GREEK = {"alpha", "beta", "gamma", "delta", "eta", "lambda", "mu", "theta", "Theta", "rho", "Delta", "omega"}
_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "sign": lambda x: x.sign(),
    "tanh": lambda x: _tensor(x).tanh(),
    "sinh": lambda x: _tensor(x).sinh(),
    "exp": lambda x: _tensor(x).exp(),
    "log": lambda x: _tensor(x).log(),
    "sigma": lambda x: _tensor(x).sigmoid(),
    "max": lambda x, y: torch.maximum(*torch.broadcast_tensors(_tensor(x), _tensor(y))),
    "min": lambda x, y: torch.minimum(*torch.broadcast_tensors(_tensor(x), _tensor(y))),
    "clip": lambda x, y: torch.maximum(torch.minimum(x, _tensor(y)), -_tensor(y)),
    "Diag": lambda *x: torch.diag(torch.cat([y.flatten() for y in x])),
    "rms": lambda x: x.square().mean().sqrt(),
    "mean": lambda x: x.mean(),
    "mean_row": lambda x: x.mean(1, keepdim=True),
    "mean_col": lambda x: x.mean(0, keepdim=True),
    "softmax_row": lambda x: x.softmax(1),
    "softmax_last": lambda x: x.softmax(1),
    "softmax_col": lambda x: x.softmax(0),
    "softmax_all": lambda x: x.flatten().softmax(0).view_as(x),
    "polar": lambda x: _polar(x),
    "Sinkhorn_20": lambda x: _doubly_stochastic(x),
    "Cayley_0.1": lambda x: _orthogonal(-0.05 * (x - x.mT)),
}


class Unread(Exception):
    """A line that the calculator does not know how to read."""


@dataclass
class Eye:
    """A multiple of the identity, as large as what it meets."""

    scale: Value = 1.0


def _tensor(x: Value) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(float(x), dtype=torch.float64)


def _polar(x: Tensor) -> Tensor:
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ torch.diag((s > 1e-9 * s[0]).to(s)) @ vh


def _doubly_stochastic(x: Tensor) -> Tensor:
    for _ in range(200):
        x = x / x.sum(1, keepdim=True)
        x = x / x.sum(0, keepdim=True)
    return x


def _orthogonal(b: Tensor) -> Tensor:
    eye = torch.eye(b.shape[-1], dtype=b.dtype)
    return torch.linalg.solve(eye + b, eye - b)


class Matrix(Tensor):
    """A square matrix to which a multiple of the identity was added: its powers are those of matrices."""


def _plain(x: Value) -> Value:
    return x.as_subclass(Tensor) if isinstance(x, Matrix) else x


def _scalar(x: Value) -> bool:
    return not isinstance(x, Tensor) or x.numel() == 1 and x.ndim < 2


def times(a: Value, b: Value) -> Value:
    a, b = _plain(a), _plain(b)
    if isinstance(a, Eye) or isinstance(b, Eye):
        eye, other = (a, b) if isinstance(a, Eye) else (b, a)
        return Eye(times(eye.scale, other)) if _scalar(other) else times(eye.scale, other)
    if _scalar(a) or _scalar(b):
        return a * b
    return a @ b


def plus(a: Value, b: Value, sign: float = 1.0) -> Value:
    a, b = _plain(a), _plain(b)
    if isinstance(a, Eye) or isinstance(b, Eye):
        if isinstance(a, Eye) and isinstance(b, Eye):
            return Eye(a.scale + sign * b.scale)
        matrix = a if isinstance(b, Eye) else b
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
        found = a + sign * b.scale * eye if isinstance(b, Eye) else a.scale * eye + sign * b
        return found.as_subclass(Matrix)
    return a + sign * b


def power(x: Value, exponent: Value) -> Value:
    if isinstance(x, Matrix):
        values, vectors = torch.linalg.eigh(x.as_subclass(Tensor))
        return vectors @ torch.diag(values ** float(exponent)) @ vectors.mT
    return x**exponent


class Line:
    """One right-hand side, read by descent. values: by name, functions by name with their brackets."""

    def __init__(self, text: str, values: Callable[[str], Value]) -> None:
        self.tokens = [next(t for t in m.groupdict().values() if t) for m in _TOKEN.finditer(text.strip())]
        self.at, self.values = 0, values

    def value(self) -> Value:
        found = self.sum()
        if self.at < len(self.tokens):
            raise Unread(f"at {self.tokens[self.at :][:5]}")
        return found

    def look(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ""

    def take(self, wanted: str | None = None) -> str:
        token = self.look()
        if not token or wanted is not None and token != wanted:
            raise Unread(f"{wanted!r} wanted, got {token!r}")
        self.at += 1
        return token

    def took(self, *tokens: str) -> bool:
        if self.look() in tokens:
            self.at += 1
            return True
        return False

    def sum(self) -> Value:
        found = times(-1.0, self.product()) if self.took("-") else self.product()
        while self.look() in ("+", "-"):
            sign = 1.0 if self.take() == "+" else -1.0
            found = plus(found, self.product(), sign)
        return found

    def product(self) -> Value:
        found = self.factor()
        while True:
            while self.took("\\,", "\\ "):
                pass
            token = self.look()
            if token == "\\odot":
                self.take()
                found = found * self.factor()
            elif token == "\\cdot":
                self.take()
                found = times(found, self.factor())
            elif token == "/":
                self.take()
                found = found / self.factor()
            elif not token or token in ("+", "-", ")", "}", ",", "|", "\\rVert", "\\right", "\\pm", ">"):
                return found
            else:
                found = times(found, self.factor())

    def factor(self) -> Value:
        found = self.base()
        while self.took("^"):
            if self.took("\\top"):
                found = found.mT if isinstance(found, Tensor) else found
            elif self.took("{"):
                if self.took("\\odot"):
                    found = found ** float(self.take())
                    self.take("}")
                else:
                    found = power(found, self.sum())
                    self.take("}")
            else:
                found = power(found, self.base())
        return found

    def base(self) -> Value:
        token = self.take()
        if re.fullmatch(r"\d+(\.\d+)?", token):
            return float(token)
        if token in ("(", "\\left"):
            if token == "\\left":
                self.take("(")
            found = self.sum()
            if token == "\\left":
                self.take("\\right")
            self.take(")")
            return found
        if token == "|":
            found = self.sum().abs()
            self.take("|")
            return found
        if token == "\\lVert":
            return self.norm()
        if token == "\\frac":
            above, below = self.braced(), self.braced()
            return above / below
        if token == "\\sqrt":
            return _tensor(self.braced()).sqrt()
        if token == "\\nabla":
            self.take("\\ell"), self.take("_"), self.take("t")
            self.take("(")
            found = self.values("gradient")(self.sum())
            self.take(")")
            return found
        return self.named(token)

    def braced(self) -> Value:
        self.take("{")
        found = self.sum()
        self.take("}")
        return found

    def norm(self) -> Value:
        x = self.sum()
        self.take("\\rVert")
        kind = ""
        if self.took("_"):
            self.take("{")
            kind = self.take()
            if kind == "\\mathrm":
                self.take("{")
                kind = "".join(self.until("}"))
            self.take("}")
        if kind and kind[0].isdigit():
            return x.abs().pow(float(kind)).sum() ** (1 / float(kind))
        return x.norm() if not kind else x.norm(dim={"row": 1, "col": 0}[kind], keepdim=True)

    def until(self, end: str) -> list[str]:
        found = []
        while self.look() != end:
            found.append(self.take())
        self.take(end)
        return found

    def named(self, token: str) -> Value:
        name = token.lstrip("\\")
        if token in ("\\bar", "\\hat", "\\mathrm"):
            self.take("{")
            inner = "".join(self.until("}"))
            name = inner if token == "\\mathrm" else f"{name} {inner}"
        elif token.startswith("\\") and name not in (*_GREEK, *_FUNCTIONS, "Pi"):
            raise Unread(token)
        while self.took("'"):
            name += "'"
        if self.look() == "^" and self.look(1) == "{" and self.look(2) == "(":
            self.at += 3
            name += "(" + self.take() + ")"
            self.take(")"), self.take("}")
        index = ""
        if self.took("_"):
            index = "".join(self.until("}")) if self.took("{") else self.take()
            index = index.replace("\\mathrm{", "")
            if self.look() == "}" and index in ("row", "col", "all", "last"):
                self.take()
        function_name = f"{name}_{index}" if index else name
        if function_name in _FUNCTIONS or name == "Pi":
            self.take("(")
            arguments = [self.sum()]
            while self.took(","):
                self.took("\\pm")
                arguments.append(self.sum())
            self.take(")")
            return (self.values("Pi") if name == "Pi" else _FUNCTIONS[function_name])(*arguments)
        if name == "I" and not index:
            return Eye()
        name = f"word {name}" if token == "\\mathrm" else name
        return self.values(f"{name}_{index}" if index else name)


def worked_out(line: str, values: dict[str, Value], lookup: Callable[[str], Value]) -> str:
    """Reads `name = value, name = value` from the last to the first into values; the name of the first."""
    parts = re.split(r",\\quad |,\\ |\\quad ", line)
    for part in reversed(parts):
        left, _, right = part.partition(" = ")
        if not right or "\\text" in part or "\\leftarrow" in part or "\\approx" in part:
            raise Unread(part)
        if left == r"\Pi(x)":
            body = right
            values["Pi"] = lambda x, body=body: Line(body, lambda n: x if n == "x" else lookup(n)).value()
            continue
        name = Line(left.removesuffix(r"^\top"), lambda n: n)
        key = name.named(name.take())
        found = Line(right, lookup).value()
        values[key] = found.mT if left.endswith(r"^\top") else found
    return key
