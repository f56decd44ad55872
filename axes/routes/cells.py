"""Signals of a token that depend on what was read last: cells, each with its derivative by hand.

A layer whose signals come from x alone is a scan; where they come from the last read too, tokens are walked. A cell
says what a token's v and rates are, from its pre-activations x and from u = W h + b, h what the last token showed; the
tuple says what they do. Legend: B batch, H heads, G pre-activations a channel, V channels of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

Carry = tuple[Tensor, ...]
_NEVER = -1e30  # the log of a weight that nothing has yet; a number, so that differences are


@dataclass(frozen=True)
class Cell(ABC):
    """carried: how many tensors go from token to token beside the state."""

    carried: ClassVar[int] = 0
    kernel: ClassVar[str]  # its name there
    text: ClassVar[str] = ""  # what graphs call it, once a layer has it

    def empty(self, like: Tensor) -> Carry:
        """What is carried before the first token."""
        return ()


class VectorCell(Cell):
    """What a token's signals are. All tensors but x and u (..., G, V) are (..., V).

    gates: G.
    """

    gates: ClassVar[int]

    def heard(self, y: Tensor, carry: Carry) -> Tensor:
        """h, what W is multiplied by: of the state, or carried."""
        return y

    @abstractmethod
    def signal(self, x: Tensor, u: Tensor, carry: Carry) -> tuple[dict[str, Tensor], Carry]:
        """What the tuple asks for, and what `shown` asks for."""

    def shown(self, y: Tensor, made: Carry) -> tuple[Tensor, Carry]:
        """The output of a token whose read is y, and what is carried on."""
        return y, ()

    @abstractmethod
    def walk(self, x: Tensor, u: Tensor, y: Tensor, carry: Carry) -> tuple[Tensor, Tensor, Carry, tuple[Tensor, ...]]:
        """One token at once: the output, the state, what is carried, and what `back` asks for."""

    @abstractmethod
    def back(
        self, kept: tuple[Tensor, ...], y: Tensor, dout: Tensor, dy: Tensor, dcarry: Carry
    ) -> tuple[Tensor, Tensor, Tensor, Carry]:
        """Gradients of x, u, the state y before, and of what was carried but h: dcarry is of what is carried on."""


@final
@dataclass(frozen=True)
class GRU(VectorCell):
    """y' = z y + (1 - z) n: r, z = sigmoid(x + u), n = tanh(x + r u)."""

    gates = 3
    kernel = "gru"

    def signal(self, x: Tensor, u: Tensor, carry: Carry) -> tuple[dict[str, Tensor], Carry]:
        r, update = torch.sigmoid(x[..., 0, :] + u[..., 0, :]), x[..., 1, :] + u[..., 1, :]
        n = torch.tanh(x[..., 2, :] + r * u[..., 2, :])
        return {"v": n, "decay": logsigmoid(update), "write": torch.sigmoid(-update)}, ()

    def walk(self, x: Tensor, u: Tensor, y: Tensor, carry: Carry) -> tuple[Tensor, Tensor, Carry, tuple[Tensor, ...]]:
        s = torch.sigmoid(x[..., :2, :] + u[..., :2, :])
        last = u[..., 2, :]
        n = torch.addcmul(x[..., 2, :], s[..., 0, :], last).tanh_()
        out = torch.lerp(n, y, s[..., 1, :])
        return out, out, (), (s, n, last)

    def back(
        self, kept: tuple[Tensor, ...], y: Tensor, dout: Tensor, dy: Tensor, dcarry: Carry
    ) -> tuple[Tensor, Tensor, Tensor, Carry]:
        s, n, last = kept
        r, z = s.unbind(-2)
        d = dout + dy
        before = d * z
        by_n = (d - before) * (1 - n * n)
        dx = torch.stack((by_n * last, d * (y - n), by_n), -2)
        dx[..., :2, :] *= s * (1 - s)
        du = dx.clone()
        du[..., 2, :] *= r
        return dx, du, before, ()


@final
@dataclass(frozen=True)
class SLSTM(VectorCell):
    """y' = y + rho (tanh(z) - y), h = sigmoid(o) y'; rho = i / n', n' = f n + i, f = sigmoid, i = exp.

    y is c / n of the paper, and log n is carried: what it subtracts from exponents, so that no number is large, is the
    log of the sum here and the largest summand there.
    """

    gates = 4  # i, f, z, o
    carried = 2  # h and log n
    kernel = "slstm"

    def empty(self, like: Tensor) -> Carry:
        return torch.zeros_like(like), torch.full_like(like, _NEVER)

    def heard(self, y: Tensor, carry: Carry) -> Tensor:
        return carry[0]

    def signal(self, x: Tensor, u: Tensor, carry: Carry) -> tuple[dict[str, Tensor], Carry]:
        i, f, z, o = (x + u).unbind(-2)
        held = carry[1] + logsigmoid(f)
        total = torch.logaddexp(held, i)
        return {"v": torch.tanh(z), "decay": held - total, "write": torch.exp(i - total)}, (torch.sigmoid(o), total)

    def shown(self, y: Tensor, made: Carry) -> tuple[Tensor, Carry]:
        return made[0] * y, (made[0] * y, made[1])

    def walk(self, x: Tensor, u: Tensor, y: Tensor, carry: Carry) -> tuple[Tensor, Tensor, Carry, tuple[Tensor, ...]]:
        pre = x + u
        i, f = pre[..., 0, :], pre[..., 1, :]
        held = carry[1] + logsigmoid(f)
        total = torch.logaddexp(held, i)
        rho, z, o = torch.exp(i - total), torch.tanh(pre[..., 2, :]), torch.sigmoid(pre[..., 3, :])
        after = torch.lerp(y, z, rho)
        out = o * after
        return out, after, (out, total), (f, rho, z, o, after)

    def back(
        self, kept: tuple[Tensor, ...], y: Tensor, dout: Tensor, dy: Tensor, dcarry: Carry
    ) -> tuple[Tensor, Tensor, Tensor, Carry]:
        f, rho, z, o, after = kept
        d = dy + dout * o
        kept_of, by_rho = 1 - rho, d * (z - y) * rho
        through = dcarry[0] - by_rho  # of log n'
        held = through * kept_of
        dx = torch.stack(
            (by_rho + through * rho, held * torch.sigmoid(-f), d * rho * (1 - z * z), dout * after * o * (1 - o)), -2
        )
        return dx, dx, d * kept_of, (held,)


__all__ = ["GRU", "SLSTM", "Carry", "Cell", "VectorCell"]
