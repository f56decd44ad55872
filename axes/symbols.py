r"""A tuple in symbols: the recursion of `axes.core.execution` with the tuple's own parts put in, as lines of LaTeX.

What is read here is the normal form, so that sugar is written out. A part of a user's own appears by its name. A test
works the lines of the catalogue out with a calculator of its own and compares them with the interpreter.

>>> from axes import Per, StateUpdate, Step
>>> from axes.costs import SquaredError
>>> print(*equations(StateUpdate(SquaredError(), algorithm=Step(Per("beta")))), sep="\n")
e_t = S_{t-1}\,k_t - v_t
u_t = -e_t\,k_t^\top
S_t = S_{t-1} + \beta_t\,u_t
o_t = S_t\,q_t
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from axes.core import costs, memory, monoids
from axes.core.algorithms import Anchor, Held, Mix, Read, Sum
from axes.core.costs import Cost, Linear
from axes.core.geometry import Geometry
from axes.core.monoids import Monoid
from axes.core.parts import Parts
from axes.core.rates import Complement, Count, Formula, Per, Rate, Variable, rate_shape
from axes.core.state_update import StateUpdate

_NAMES = {
    "lr": r"\eta_t",
    "eta": r"\eta_t",
    "beta": r"\beta_t",
    "gamma": r"\gamma_t",
    "delta": r"\delta_t",
    "decay": r"\alpha_t",
    "forget": "f_t",
    "momentum": r"\mu_t",
    "weight_decay": r"\lambda",
    "dt": r"\Delta_t",
    "theta": r"\theta_t",
    "input": "i_t",
    "distance": r"\rho_t",
    "average": "c_t",
    "mix": "M_t",
    "A": "A",
}
_OUT_OF_A_DRIVE = {  # what drives a statistic, of the drive u, what was whitened of it, y, and bases Q and P
    "drive": "{u}",
    "square": r"{u} \odot {u}",
    "magnitude": r"|{u}|",
    "unit": "1",
    "row-square": r"\mathrm{{mean}}_{{\mathrm{{row}}}}({u} \odot {u})",
    "column-square": r"\mathrm{{mean}}_{{\mathrm{{col}}}}({u} \odot {u})",
    "left": r"{u}\,{u}^\top",
    "right": r"{u}^\top {u}",
    "white-square": r"y_t \odot y_t",
    "white-left": r"y_t\,y_t^\top / d_k",
    "white-right": r"y_t^\top y_t / d_v",
    "eigen-square": r"({Q}^\top {u}\,{P})^{{\odot 2}}",
    "eigen-square-left": r"({Q}^\top {u})^{{\odot 2}}",
    "eigen-square-right": r"({u}\,{Q})^{{\odot 2}}",
    "eigen-fisher": r"({Q}^\top e_t\,k_t^\top {P})^{{\odot 2}}",
    "key": r"k_t\,k_t^\top",
    "value": r"v_t\,v_t^\top",
    "error": r"e_t\,e_t^\top",
    "state": "{m}_t",
    "travel": r"\langle {u}, W_{{t-1}} - W_0 \rangle",
}
_STATISTICS = {"left": "L", "right": "R", "white-left": "L", "white-right": "R", "key": "K", "value": "V", "error": "E"}
_LONG = 40  # characters of a formula that is given a name


def equations(update: StateUpdate) -> tuple[str, ...]:
    """The recurrence of a tuple, one line of LaTeX for each thing that a step works out, in the order in which it does.

    S is a Euclidean state and Theta a dual one, read through W = grad h*(Theta). m are the states of filters; v (s
    beside values), L, R, K, V and E those of statistics, with a hat where they are read corrected or through an h of
    their own; d is what a filter passes on, f what a memory answers, n_t a state's response to a drive of ones. Long
    formulas of the datum's number are c.
    """
    p = update.parts()
    if isinstance(p.memory, memory.Fenwick):
        lines = _weighed_levels(p)
    else:
        lines = _listed(p) if isinstance(p.memory, memory.List) else _stepped(p)
    return tuple(line.replace("+ -", "- ") for line in _with_names(p.rates(), lines))


def _stepped(p: Parts) -> list[str]:
    keyed = p.memory.keyed
    linear = isinstance(p.memory, memory.Matrix | memory.Entries | memory.Slots | memory.Solved)
    weights = "S" if linear and p.h.is_identity or isinstance(p.memory, memory.Slots) else "W"
    dual = not p.h.is_identity and p.step.lazy and weights == "W"
    state = r"\Theta" if dual else weights
    lines = [f"f(W, x) = {_ANSWERS[type(p.memory)]}"] if type(p.memory) in _ANSWERS else []
    if p.step.at == "gated":
        before = kept(p.monoid, p.step.rate, f"{state}_{{t-1}}")
        lines.append(rf"\bar{{{weights}}}_t = {primal(p.h, before, [])}")
    lines += _driven(p, _point(p, weights), weights)
    writer = _Writer("s" if keyed else "v")
    own = len(lines)
    drive = writer.filtered(p, "u_t", lines)
    if isinstance(p.step.read, Mix) and p.step.at == "read":  # the weights around a filter are then what is shown
        lines[own:] = [line.replace("W_{t-1}", "y_{t-1}") for line in lines[own:]]
    held = p.step.at == "gated" and p.h.is_identity
    lines.append(_written(p, state, drive, rf"\bar{{{weights}}}_t" if held else None))
    stats = writer.statistics(p, drive, state, lines)
    if not p.step.lazy:
        columns = r"x / \lVert x \rVert\ \text{on every column}"
        lines[-1] += rf",\quad \Pi(x) = {columns if isinstance(p.memory, memory.Slots) else primal(p.h, 'x', stats)}"
    if dual:
        lines.append(f"W_t = {primal(p.h, state + '_t', stats)}")
    if isinstance(look := p.step.read, Mix):
        lines.append(f"y_t = {_mixed(look, weights + '_t', drive)}")
    if isinstance(look, Read) and not keyed:
        lines.append(f"y_t = {primal(p.h, writer.asked(p, state, drive, lines), stats)}")
    if p.step.writes > 1:
        lines.append(rf"\text{{the same for }}(k_{{t,j}}, v_{{t,j}}),\quad j = 1, \dots, {p.step.writes}")
    if p.step.reads > 1:
        last = _read(p, state, weights, drive, stats).replace("o_t", "o_{t,j}").replace("q_t", "q_{t,j}")
        return [*lines, rf"{last},\quad j = 1, \dots, {p.step.reads}"]
    return [*lines, _read(p, state, weights, drive, stats)] if keyed else lines


def _with_names(rates: Iterable[Rate], lines: list[str]) -> list[str]:
    """The lines with long formulas called by names, which are defined ahead of them."""
    found = sorted({text for r in rates for text in _formulas(r) if len(text) > _LONG}, key=len)
    whole = "".join(lines)
    inside = {text for text in found if any(text in other for other in found if other != text)}
    found = [text for text in found if whole.count(text) > 1 or text not in inside]
    named = {text: "c" + "'" * i + "_t" if i < 3 else f"c^{{({i + 1})}}_t" for i, text in enumerate(found)}

    def short(text: str, among: list[str]) -> str:
        for formula in reversed(among):
            for shown in (f"({formula})", formula):
                text = text.replace(shown, named[formula])
        return text

    heads = [f"{named[text]} = {short(text, found[:i])}" for i, text in enumerate(found)]
    return heads + [short(line, found) for line in lines]


def _formulas(value: Rate) -> Iterator[str]:
    if isinstance(value, Formula):
        beside_a_number = value.operation in "+-" and not all(isinstance(x, Variable) for x in value.inputs)
        if value.operation != ">" and not beside_a_number:
            yield rate(value)
        for x in value.inputs:
            yield from _formulas(x)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def rate(value: Rate, tight: bool = False) -> str:
    """A number, a named rate or a formula of these. tight: as a factor, so that sums stand in brackets."""
    if isinstance(value, Per):
        return _NAMES.get(value.name, rf"\mathrm{{{value.name.replace('_', '-')}}}_t")
    if isinstance(value, Count):
        return "t"
    if isinstance(value, Complement):
        return f"(1 - {rate(value.of)})"
    if isinstance(value, Formula):
        text = _formula(value)
        return f"({text})" if tight and value.operation in "+->" else text
    assert not isinstance(value, Variable)
    return _number(value)


def _number(x: float) -> str:
    text = f"{x:.4g}"
    if "e" not in text:
        return text
    mantissa, exponent = text.split("e")
    return (rf"{mantissa} \cdot " if mantissa != "1" else "") + rf"10^{{{int(exponent)}}}"


def _formula(f: Formula) -> str:
    a = [rate(x) for x in f.inputs]
    factors = [rate(x, tight=True) for x in f.inputs]
    match f.operation:
        case "/":
            return rf"\frac{{{a[0]}}}{{{a[1]}}}"
        case "**":
            base = f"({a[0]})" if isinstance(f.inputs[0], Formula) else a[0]
            return rf"{base}^{{{a[1]}}}"
        case "*":
            return rf"{factors[0]} \cdot {factors[1]}" if factors[1][0].isdigit() else rf"{factors[0]}\,{factors[1]}"
        case "+" | ">":
            return f" {f.operation} ".join(a)
        case "-":
            return f"{a[0]} - {factors[1]}"
        case "minimum" | "maximum":
            return rf"\{f.operation[:3]}({a[0]}, {a[1]})"
        case "where":
            return rf"({a[1]}\ \text{{if}}\ {a[0]}\ \text{{else}}\ {a[2]})"
        case _:
            return rf"\log({a[0]})"


def _times(value: Rate, x: str) -> str:
    """A rate times a state: entries of a row rate belong to rows, those of a key rate to columns."""
    if value == 1.0:
        return x
    if x == "1":
        return rate(value)
    x = f"({x})" if " " in x and not x.startswith((r"\frac", "(")) and x != _NORM else x
    match rate_shape(value):
        case "row" | "own":
            return rf"\mathrm{{Diag}}({rate(value)})\,{x}"
        case "row-pair":
            return rf"\mathrm{{Diag}}({rate(value)}, {rate(value)})\,{x}"
        case "pair":
            return rf"{x}\,\mathrm{{Diag}}({rate(value)}, {rate(value)})"
        case "key":
            return rf"{x}\,\mathrm{{Diag}}({rate(value)})"
        case "square":
            return rf"{rate(value)} \odot {x}"
        case _:
            return rf"{rate(value, tight=True)}\,{x}"


def _bracketed(x: str) -> str:
    return f"({x})" if " " in x and not x.startswith((r"\frac", "(")) else x


# ---- monoids: how the old state is kept ------------------------------------------------------------------------------


def kept(monoid: Monoid, step: Rate, x: str) -> str:
    """The state x after retention, "" for none of it."""
    match monoid:
        case monoids.Identity():
            return x
        case monoids.Zero():
            return ""
        case monoids.Scalar():
            assert not isinstance(monoid.gate, str)
            return _times(monoid.gate, x)
        case monoids.Decay(weight=weight, independent=alone):
            return rf"(1 - {rate(weight, tight=True) if alone else _product(step, weight)})\,{x}"
        case monoids.Diagonal():
            assert isinstance(monoid.gate, Per)
            return _times(monoid.gate, x)
        case monoids.Hadamard(times=times):
            assert isinstance(monoid.gate, Per)
            gate = rate(monoid.gate)
            if times is not None:
                gate = rf"\exp({_times(times, rf'{chr(92)}log({gate})')})"
            return rf"{gate} \odot {f'({x})' if chr(92) in x[1:] else x}"
        case monoids.Rotation(angle=angle):
            if isinstance(angle, Per) and angle.shape == "row-pair":
                return rf"R({rate(angle)})\,{_bracketed(x)}"
            turn = rate(angle) if isinstance(angle, Variable) else r"\omega"
            return rf"{x}\,R({turn})"
        case monoids.Householder(beta=beta, key=key):
            w = "w" if key is None else f"{key}_t"
            if rate_shape(beta) == "key":
                return rf"{x}\,(I - ({rate(beta)} \odot {w})\,{w}^\top)"
            return rf"{x}\,(I - {rate(beta)}\,{w}\,{w}^\top)"
        case monoids.DPLR():
            assert not isinstance(monoid.gate, str)
            diagonal = _times(monoid.gate, "I")
            if rate_shape(monoid.gate) == "key":
                diagonal = rf"\mathrm{{Diag}}({rate(monoid.gate)})"
            return rf"{x}\,({diagonal} + {monoid.left}_t\,{monoid.right}_t^\top)"
        case monoids.GeneralLinear(logits=logits, link=link):
            matrix = rate(logits)
            return rf"{x}\,{primal(link, matrix, [])}^\top"
        case monoids.Product(parts=parts):
            for part in parts:
                x = kept(part, step, x)
            return x
    return rf"\mathrm{{{type(monoid).__name__}}}_t({x})"


def _product(a: Rate, b: Rate) -> str:
    if a == 1.0 or b == 1.0:
        return rate(b if a == 1.0 else a)
    second = rate(b, tight=True)
    return rate(a, tight=True) + (r" \cdot " if second[0].isdigit() else r"\,") + second


# ---- costs and memories: where the drive comes from ------------------------------------------------------------------


def _point(p: Parts, weights: str) -> str:
    """The weights at which the gradient is taken."""
    match p.step.at:
        case Anchor(every=b):
            return rf"{weights}_{{{b} \lfloor (t-1)/{b} \rfloor}}"
        case "gated":
            return rf"\bar{{{weights}}}_t"
        case "new":
            return f"{weights}_t"
        case "read":
            return r"y_{t-1}"
    return f"{weights}_{{t-1}}"


def _driven(p: Parts, at: str, weights: str) -> list[str]:
    """The drive u_t = -grad l at the point `at`."""
    cost = p.cost
    ridge, base = "", cost
    if isinstance(cost, costs.Ridge):
        pulled = f"{weights}_{{t-1}}" if p.step.at == "read" and isinstance(p.step.read, Read) else at
        ridge, base = f" - {_times(cost.weight, pulled)}", cost.cost
    if p.oracle:
        return [rf"u_t = -\nabla \ell_t({at}){ridge}"]
    encode = cost.encode
    x, target = ("v_t", "k_t") if encode else ("k_t", "v_t")
    lines = []
    r = "v_t"
    sign = ""
    if not isinstance(base, costs.Alignment):
        prediction = predicted(p.memory, at, x, encode)
        if isinstance(base, costs.CrossEntropy):
            lines.append(rf"p_t = {prediction}")
        else:
            lines.append(rf"e_t = {prediction} - {target}")
            if isinstance(p.memory, memory.Slots):
                columns = rf"\text{{of the columns}}\ s_i\ \text{{of}}\ {at}"
                lines[-1] += rf",\quad \Phi = (s_i / \lVert s_i \rVert)\ {columns}"
        r, sign = residual(base), "-"
    elif encode:
        r = "k_t"
    if isinstance(p.memory, memory.Matrix | memory.Solved):
        write = rf"v_t\,{r}^\top" if encode else rf"{r}\,k_t^\top"
    elif isinstance(p.memory, memory.Entries):
        write = rf"{r} \odot (1\,k_t^\top)"
    elif isinstance(p.memory, memory.Slots):
        h, c = ("v_t", r) if encode else (r, "k_t")
        c = c.replace("_t", "_{t,i}")
        write = rf"P(s_i)\,{h}\,{c} / \lVert s_i \rVert,\quad P(s) = I - \frac{{s\,s^\top}}{{\lVert s \rVert^2}}"
        return [*lines, rf"u_{{t,i}} = {sign}{write}"]
    else:
        write = rf"\left(\frac{{\partial f({at}, {x})}}{{\partial W}}\right)^{{\!\top}} {r}"
    return [*lines, rf"u_t = {sign}{write}{ridge}"]


_ANSWERS: dict[type, str] = {
    memory.LayerNormMatrix: r"x + \mathrm{LN}(W x)",
    memory.MLP: r"x + \mathrm{LN}(W^{(1)}\,\mathrm{gelu}(W^{(2)} x))",
}


def predicted(kind: memory.Memory, at: str, x: str, encode: bool) -> str:
    """What a memory with weights `at` answers to x."""
    match kind:
        case memory.Entries():
            return rf"{at} \odot (1\,{x}^\top)"
        case memory.Slots():
            return rf"\Phi^\top {x}" if encode else rf"\Phi\,{x}"
        case memory.Matrix():
            return rf"{at}^\top {x}" if encode else rf"{at}\,{x}"
    return f"f({at}, {x})"


def residual(cost: Cost) -> str:
    """dl/dp of a cost, in terms of the error e."""
    match cost:
        case costs.SquaredError():
            return "e_t"
        case costs.Lp(p=p, smooth=smooth, mean_one=one):
            factor = "" if one or p == 1.0 else rf"{_number(p)}\,"
            if isinstance(smooth, tuple):
                bend = "" if p == 1.0 else rf" \odot (e_t^2 + {_number(smooth[1])})^{{{_number((p - 1) / 2)}}}"
                return rf"{factor}\tanh({_number(smooth[0])}\,e_t){bend}"
            if p == 1.0:
                return r"\mathrm{sign}(e_t)"
            return rf"{factor}\mathrm{{sign}}(e_t) \odot |e_t|^{{{_number(p - 1)}}}"
        case costs.Huber(delta=delta, kind="coordinate"):
            return rf"\mathrm{{clip}}(e_t, \pm {rate(delta)})"
        case costs.Huber(delta=delta):
            return rf"\min(1, {rate(delta)} / \lVert e_t \rVert)\,e_t"
        case costs.HuberSwitch(delta=delta):
            d = rate(delta)
            return rf"(e_t\ \text{{if}}\ \lVert e_t \rVert \le {d}\ \text{{else}}\ {d}\,\mathrm{{sign}}(e_t))"
        case costs.RobustShift(Delta=delta):
            return rf"(1 + {rate(delta)} / \lVert e_t \rVert)\,e_t"
        case costs.CrossEntropy():
            return r"(\mathrm{softmax}(p_t) - v_t)"
    return rf"\mathrm{{{type(cost).__name__}}}'(e_t)"


# ---- geometries: W = grad h*(theta) ----------------------------------------------------------------------------------


def primal(h: Geometry, x: str, stats: list[str]) -> str:
    """The link of a geometry at x; stats: the names of what its statistics give."""
    found = _LINKS.get(type(h).__name__)
    if found is not None and type(h).__module__.startswith("axes."):
        return found(h, x, list(stats))
    return rf"\mathrm{{{type(h).__name__}}}({x})"


def _whiten(h: Any, x: str, s: list[str]) -> str:
    if h.kind in ("diagonal", "centered"):
        v = s[0] if h.kind == "diagonal" else rf"({s[0]} - {s[1]} \odot {s[1]})"
        eps = "" if h.eps == 0 else f" + {_number(h.eps)}"
        if h.power < 0:
            return rf"{x} \odot {_power(v + eps, -h.power)}"
        below = _power(v + eps, h.power) if h.eps_inside else _power(v, h.power) + eps
        return rf"\frac{{{x}}}{{{rf'{chr(92)}max({below}, {_number(h.floor)})' if h.floor else below}}}"
    eps = "I" if h.eps == 1.0 else f"{_number(h.eps)} I"
    roots = [rf"{f'({v} + {eps})' if h.eps else v}^{{-{_number(h.power)}}}" for v in s]
    if h.kind == "kronecker":
        return rf"{roots[0]}\,{x}\,{roots[1]}"
    return rf"{x}\,{roots[0]}" if h.kind == "right" else rf"\mathrm{{mat}}({roots[0]}\,\mathrm{{vec}}({x}))"


def _power(x: str, power: float) -> str:
    if power == 0.5:
        return rf"\sqrt{{{x}}}"
    if power == 1.0:
        return x
    return rf"{f'({x})' if ' ' in x else x}^{{{_number(power)}}}"


def _entropic(h: Any, x: str, s: list[str]) -> str:
    over = {"row": r"\mathrm{row}", "column": r"\mathrm{col}", "whole": r"\mathrm{all}", "last": r"\mathrm{last}"}
    mass = r"\sqrt{d_k}\," if h.mass is None else "" if h.mass == 1.0 else rf"{_number(h.mass)}\,"
    return rf"{mass}\mathrm{{softmax}}_{{{over[h.axis]}}}({x})"


def _sphere(h: Any, x: str, s: list[str]) -> str:
    length = {"rows": r"_{\mathrm{row}}", "columns": r"_{\mathrm{col}}", "whole": ""}[h.axis]
    size = {"rows": "d_k", "columns": "d_v", "whole": r"d_v\,d_k"}[h.axis]
    radius = rf"\sqrt{{{size}}}\," if h.radius is None else "" if h.radius == 1.0 else rf"{_number(h.radius)}\,"
    return rf"{radius}\frac{{{x}}}{{\lVert {x} \rVert{length}}}"


_SCALES = {
    None: "",
    "original": r"\sqrt{\max(1, m/n)}\,",
    "match_rms_adamw": r"0.2\,\sqrt{\max(m, n)}\,",
    "spectral": r"\sqrt{m/n}\,",
}


def _polar(h: Any, x: str, s: list[str]) -> str:
    return rf"{_SCALES[h.scale]}\mathrm{{polar}}({x})"


def _low_rank(h: Any, x: str, s: list[str]) -> str:
    return rf"{_SCALES[h.scale]}P\,Q^\top,\quad Q = R / \lVert R \rVert_{{\mathrm{{col}}}},\ (P, R) = {s[0]}"


def _ball(h: Any, x: str, s: list[str]) -> str:
    radius = rate(h.radius)
    if h.norm == "max":
        return rf"\mathrm{{clip}}({x}, \pm {radius})"
    norm = r"\mathrm{rms}" + f"({x})" if h.norm == "rms" else rf"\lVert {x} \rVert"
    return rf"\min(1, {radius} / {norm})\,{x}"


_NORM = r"\lVert W_{t-1} \rVert"


def _trust(h: Any, x: str, s: list[str]) -> str:
    c = "" if h.coefficient == 1.0 else rf"{rate(h.coefficient)}\,"
    inner = primal(h.base, x, s)
    below = r"\lVert y \rVert"
    if h.length == "parts":
        below = rf"\lVert {primal(h.base.base, x, s)} \rVert + {_times(h.base.weight, _NORM)}"
    above = _NORM
    if h.bounds is not None:
        least, most = map(_number, h.bounds)
        above = rf"\min(\max({_NORM}, {least}), {most})"
    return rf"{c}\frac{{{above}}}{{{below}}}\,y,\quad y = {inner}"


def _normed(h: Any, x: str, s: list[str]) -> str:
    size = rf"\lVert {x} \rVert" if h.rms is None else rf"{_number(h.rms)} \sqrt{{m n}}"
    return rf"{size}\,\frac{{y}}{{\lVert y \rVert}},\quad y = \frac{{{x}}}{{\sqrt{{{s[0]}}}}}"


def _rank_one(h: Any, x: str, s: list[str]) -> str:
    added = h.guard == "added" and h.eps is not None and h.eps > 1e-20
    rows, columns = (f"({v} + {_number(h.eps)})" if added else v for v in s)
    return rf"\frac{{{x}}}{{\sqrt{{{rows}\,{columns} / \mathrm{{mean}}({rows})}}}}"


def _composite(h: Any, x: str, s: list[str]) -> str:
    inner = len(h.inner.stats)
    return primal(h.outer, primal(h.inner, x, s[:inner]), s[inner:])


def _graft(h: Any, x: str, s: list[str]) -> str:
    n = len(h.base.stats)
    a, b = primal(h.base, x, s[:n]), primal(h.magnitude, x, s[n:])
    return rf"\lVert b \rVert\,\frac{{a}}{{\lVert a \rVert}},\quad a = {a},\ b = {b}"


def _rotated(h: Any, x: str, s: list[str]) -> str:
    left, right, v = s if len(s) == 3 else (s[0], s[0], s[-1])
    root = rf"\sqrt{{{v}}}" if h.power == 0.5 else rf"{v}^{{{_number(h.power)}}}" if h.power != 1.0 else v
    return rf"{left} \left( \frac{{{left}^\top {x}\,{right}}}{{{root} + {_number(h.eps)}}} \right) {right}^\top"


def _root(h: Any, x: str, s: list[str]) -> str:
    return rf"({x} + \epsilon I)^{{-{_number(h.power)}}}"


_LINKS: dict[str, Callable[[Any, str, list[str]], str]] = {
    "Euclidean": lambda h, x, s: x,
    "Entropic": _entropic,
    "Lq": lambda h, x, s: (
        rf"\frac{{\mathrm{{sign}}({x}) \odot |{x}|^{{{_number(h.p - 1)}}}}}"
        rf"{{\lVert {x} \rVert_{{{_number(h.p)}}}^{{{_number(h.p - 2)}}}}}"
    ),
    "LqLiteral": lambda h, x, s: rf"\frac{{{x}}}{{\lVert {x} \rVert_{{{_number(h.p)}}}^{{{_number(h.p - 2)}}}}}",
    "SoftThreshold": lambda h, x, s: rf"\mathrm{{sign}}({x}) \odot \max(|{x}| - {rate(h.threshold)}, 0)",
    "Shrink": lambda h, x, s: _times(h.factor, x),
    "Bounded": lambda h, x, s: rf"\sigma({x})",
    "Hypentropy": lambda h, x, s: ("" if h.scale == 1.0 else rf"{rate(h.scale)}\,") + rf"\sinh({x})",
    "Sphere": _sphere,
    "SignBall": lambda h, x, s: rf"\mathrm{{sign}}({x})",
    "Spectral": _polar,
    "Whiten": _whiten,
    "Ball": _ball,
    "Birkhoff": lambda h, x, s: rf"\mathrm{{Sinkhorn}}_{{{h.iterations}}}(\exp({x}))",
    "Permutations": lambda h, x, s: rf"\left(\sum_\pi \mathrm{{softmax}}({x})_\pi\,P_\pi\right)",
    "Cayley": lambda h, x, s: rf"\mathrm{{{'Mean' * (h.kind != 'full')}Cayley}}_{{{_number(h.scale)}}}({x})",
    "KeyNormalised": lambda h, x, s: rf"\frac{{{x}}}{{{_number(h.eps)} + \lVert k_t \rVert^2}}",
    "Decayed": lambda h, x, s: rf"{primal(h.base, x, s)} - {rate(h.weight)}\,W_{{t-1}}",
    "TrustRatio": _trust,
    "RelativeStep": lambda h, x, s: rf"\max(\mathrm{{rms}}(W_{{t-1}}), {rate(h.least)})\,{primal(h.base, x, s)}",
    "Cautious": lambda h, x, s: rf"\mathrm{{mask}}(y \odot u_t > 0)\,y,\quad y = {primal(h.base, x, s)}",
    "ConstantNorm": lambda h, x, s: rf"\mathrm{{tangent}}_{{W_{{t-1}}}}({primal(h.base, x, s)})",
    "NormedWhiten": _normed,
    "RankOneWhiten": _rank_one,
    "Composite": _composite,
    "Graft": _graft,
    "Distance": lambda h, x, s: x,
    "InverseRoot": _root,
    "FittedFactor": lambda h, x, s: rf"\mathrm{{fitted}}({x})",
    "Eigenbasis": lambda h, x, s: rf"\mathrm{{eigenvectors}}({x})",
    "Kronecker": lambda h, x, s: rf"{s[0]}\,{x}\,{s[1]}" if len(s) == 2 else rf"{s[0]}\,{x}",
    "RotatedWhiten": _rotated,
    "PowerFactors": lambda h, x, s: rf"(P, R)\ \text{{with}}\ P\,R^\top \approx {x},\ P^\top P = I",
    "LowRank": _low_rank,
}


# ---- filters, statistics and the state -------------------------------------------------------------------------------


class _Writer:
    """Writes the recurrences inside of a tuple, and gives every state a letter of its own."""

    def __init__(self, statistic: str) -> None:
        self.statistic = statistic
        self.used: dict[str, int] = {}

    def letter(self, wanted: str) -> str:
        primes = self.used.get(wanted, 0)
        self.used[wanted] = primes + 1
        return wanted + "'" * primes

    def filtered(self, p: Parts, drive: str, lines: list[str]) -> str:
        """The drive behind the filters."""
        for f in p.step.via:
            if isinstance(f, Sum):
                outs = [self.inner(b.parts(), drive, lines, "m") for b in f.branches]
                value = " + ".join(_times(w, x) for w, x in zip(f.weights, outs, strict=True))
                drive = self.named("d", value, lines)
            else:
                drive = self.inner(f.parts(), drive, lines, "m")  # type: ignore[union-attr]
        return drive

    def statistics(self, p: Parts, drive: str, state: str, lines: list[str]) -> list[str]:
        """What the statistics of h give, in its order."""
        found: list[str] = []
        before: list[str] = []
        first = len(lines)
        for s in p.statistics():
            cost = s.cost
            assert isinstance(cost, Linear)
            raw = "u_t" if cost.raw else drive
            z = _OUT_OF_A_DRIVE[cost.of].format(u=raw, m=state, Q=(found or ["Q"])[0], P=(found or ["Q"])[-1])
            if cost.offset != 0.0:
                z += f" + {rate(cost.offset)}"
            letter = _STATISTICS.get(cost.of, self.statistic)
            before.append(letter + "'" * self.used.get(letter, 0) + "_{t-1}")
            found.append(self.inner(s, z, lines, letter, statistic=True))
        if any(isinstance(s.cost, Linear) and s.cost.whitened for s in p.statistics()):
            lines.insert(first, f"y_t = {primal(p.h, drive, before)}")
        return found

    def named(self, letter: str, value: str, lines: list[str]) -> str:
        name = f"{self.letter(letter)}_t"
        lines.append(f"{name} = {value}")
        return name

    def inner(self, p: Parts, drive: str, lines: list[str], letter: str, statistic: bool = False) -> str:
        """A filter's or a statistic's lines; what it passes on."""
        drive = self.filtered(p, drive, lines)
        if isinstance(p.monoid, monoids.Zero) and p.step.read is None and p.step.write == "sum":
            stats = self.statistics(p, drive, letter, lines)
            value = primal(p.h, _times(p.step.rate, drive), stats)
            return drive if value == drive else self.named(letter if statistic else "d", value, lines)
        state = self.letter(letter)
        if p.step.rate != 0.0:
            lines.append(_written(p, state, drive))
        stats = self.statistics(p, drive, state, lines)
        value = primal(p.h, self.asked(p, state, drive, lines), stats)
        if value == f"{state}_t":
            return value
        if isinstance(p.step.read, Mix):
            value = _mixed(p.step.read, self.named("d", value, lines), drive)
        own = rf"\hat{{{state[0]}}}{state[1:]}" if statistic or p.h.is_identity else "d"
        out = self.named(own, value, lines)
        if p.step.feedback != 0.0:
            used = _times(p.step.feedback, r"P\,R^\top")
            lines.append(rf"{state}_t \leftarrow {state}_t - {used}")
        return out

    def asked(self, p: Parts, state: str, drive: str, lines: list[str]) -> str:
        """What is read of a state: itself, a read point, and either over its response to ones."""
        look, step, gate = p.step.read, p.step.rate, getattr(p.monoid, "gate", None)
        point = f"{state}_t"
        if isinstance(look, Read):
            terms = [_times(look.gate, f"{state}_{{t-1}}")] if look.gate != 0.0 else []
            terms += [_times(look.rate, drive)] if look.rate != 0.0 else []
            point = " + ".join(terms)
        if not p.step.debias or p.memory.keyed:
            return point
        constant = isinstance(gate, float) and isinstance(step, float) and abs(1.0 - gate - step) < 1e-12
        if constant and not isinstance(look, Read):
            return rf"{point} / (1 - {_number(gate)}^t)"  # type: ignore[arg-type]
        n = self.letter("n")
        lines.append(f"{n}_t = {' + '.join(x for x in (kept(p.monoid, step, f'{n}_{{t-1}}'), rate(step)) if x)}")
        if not isinstance(look, Read):
            return rf"{point} / {n}_t"
        below = " + ".join((_times(look.gate, f"{n}_{{t-1}}"), rate(look.rate)))
        return rf"({point}) / ({below})"


def _written(p: Parts, state: str, drive: str, before: str | None = None) -> str:
    """The line of a state after the datum. before: what is kept of it, by the name it has already."""
    old = kept(p.monoid, p.step.rate, f"{state}_{{t-1}}") if before is None else before
    write = _times(p.step.rate, drive) if p.step.rate != 0.0 else ""
    if p.step.write == "max":
        value = rf"\max({old}, {write})"
    else:
        value = " + ".join(x for x in (old, write) if x)
    line = f"{state}_t = {value}" if p.step.lazy else rf"{state}_t = \Pi({value})"
    start = p.step.start
    if start == "W0":
        line += rf",\quad {state}_0 = W_0"
    elif start == "first":
        line += rf",\quad {state}_1 = \text{{the first}}"
    elif isinstance(start, float):
        line += rf",\quad {state}_0 = {_number(start)}"
    if isinstance(p.step.at, Held) and p.step.at.every > 1:
        line += rf"\quad \text{{(read every {p.step.at.every})}}"
    return line + (rf"\quad \text{{({p.step.steps} times)}}" if p.step.steps > 1 else "")


def _mixed(look: Mix, weights: str, drive: str) -> str:
    """Between what is held and what was just passed on."""
    w = look.weight
    rest: Rate = 1.0 - w
    return drive if w == 0.0 else f"{_times(w, weights)} + {_times(rest, drive)}"


def _read(p: Parts, state: str, weights: str, drive: str, stats: list[str]) -> str:
    """The output at a query."""
    point = f"{weights}_t"
    if isinstance(p.step.read, Read):
        inner = _Writer("").asked(p, state, drive, [])
        point = rf"({inner})" if p.h.is_identity else primal(p.h, inner, stats)
    if type(p.memory) in _ANSWERS:
        return f"o_t = f({point}, q_t)"

    def total(name: str, x: str) -> str:
        written = _times(p.step.rate, rf"{x}_t {x}_t^\top")
        return f"{kept(p.monoid, p.step.rate, f'{name}_{{t-1}}')} + {written}"

    if isinstance(p.memory, memory.Regression):
        added = rf"\mathrm{{Diag}}({rate(p.memory.ridge)})" if isinstance(p.memory.ridge, Per) else ""
        added = added or rf"{_number(p.memory.ridge)}\,I"  # type: ignore[arg-type]
        solve = rf"\mathrm{{CG}}_{{{p.memory.steps}}}(R_t + {added},\, q_t)"
        return rf"o_t = {point}\,x,\quad x = {solve},\quad R_t = {total('R', 'k')}"
    if isinstance(p.memory, memory.Correlation):
        m = p.memory
        root = rf"\mathrm{{CG}}^{{-1/2}}_{{{m.steps},{m.shifts}}}"
        inner = rf"{point}\,{root}(R_t + {_number(m.ridge)}\,I,\, q_t)"
        sums = rf"R_t = {total('R', 'k')},\quad L_t = {total('L', 'v')}"
        return rf"o_t = {root}(L_t + {_number(m.ridge)}\,I,\, {inner}),\quad {sums}"
    read = rf"{point}\,q_t"
    if not p.step.debias:
        return f"o_t = {read}"
    before = kept(p.monoid, p.step.rate, r"z_{t-1}^\top")
    mass = r"z_t^\top q_t" if not p.step.floor else rf"\max(|z_t^\top q_t|, {_number(p.step.floor)})"
    written = _times(p.step.rate, r"k_t^\top")
    return rf"o_t = \frac{{{read}}}{{{mass}}},\quad z_t^\top = {before} + {written}"


def _weighed_levels(p: Parts) -> list[str]:
    """Levels of a Fenwick tree: what is full moves up, then one step for each."""
    assert isinstance(p.memory, memory.Fenwick) and isinstance(p.memory.weights, Per)
    moved = r"\bar{S}_t^{(l)} = \sum_j S_{t-1}^{(j)}\ \text{over levels}\ j\ \text{whose tokens}\ s\ \text{have}\ "
    moved += r"\lceil \log_2(1 + (t \oplus s)) \rceil = l"
    written = _times(p.step.rate, r"v_t\,k_t^\top")
    above = kept(p.monoid, p.step.rate, r"\bar{S}_t^{(l)}")
    weight = rate(p.memory.weights).replace("_t", "_{t,l}")
    return [
        moved,
        rf"S_t^{{(l)}} = {above}\ (l > 0),\quad S_t^{{(0)}} = {written}",
        rf"o_t = \sum_{{l < {p.memory.levels}}} {weight}\,S_t^{{(l)}}\,q_t",
    ]


def _listed(p: Parts) -> list[str]:
    """A list keeps pairs: gates act on their mass, matrices on their keys."""
    assert isinstance(p.memory, memory.List)
    scale = r"d_k^{-1/2}" if p.memory.scale is None else _number(p.memory.scale)
    scale = "" if scale == "1" else rf"{scale}\,"
    gates = [m for m in _factors(p.monoid) if isinstance(m, monoids.Scalar)]
    moves = [m for m in _factors(p.monoid) if not isinstance(m, monoids.Scalar | monoids.Identity)]
    lines = [r"K_t = (k_1, \dots, k_t),\quad V_t = (v_1, \dots, v_t)"]
    key, mass = "k_i", ""
    if moves:
        for m in moves:
            shown = kept(m, 1.0, r"k_i^\top")
            lines.append(rf"k_i^\top \leftarrow {shown}\quad (i < t)")
    if gates:
        assert not isinstance(gates[0].gate, str)
        gate = rate(gates[0].gate)
        mass = " + m_i"
        lines.append(rf"m_i \leftarrow m_i + \log {gate}\quad (i < t),\quad m_t = 0")
    weights = rf"\mathrm{{softmax}}_i({scale}{key}^\top q_t{mass})"
    if p.h.is_identity:
        weights = rf"{scale}{key}^\top q_t"
    value = "v_i"
    if not isinstance(p.cost, costs.Alignment):
        value, seen = "u_i", weights.replace("q_t", "k_t")
        if p.memory.errors is not None:
            seen = _kernel(p.memory.errors, mass)
            lines.append(r"\hat{k}_i = k_i / \lVert k_i \rVert")
        error = rf"v_t - \sum_{{i<t}} {seen}\,u_i"
        lines.append(rf"u_t = {error if p.step.rate == 1.0 else _times(p.step.rate, f'({error})')}")
    window = f"i > t - {p.memory.window}" if p.memory.window else r"i \le t"
    if p.memory.first:
        window += rf" \text{{ or }} i \le {p.memory.first}"
    lines.append(rf"o_t = \sum_{{{window}}} {weights}\,{value}")
    return lines


def _kernel(kernel: memory.Kernel, mass: str) -> str:
    """Of the token's key and a stored one."""
    cosine = r"\hat{k}_i^\top \hat{k}_t"
    if kernel.of == "linear":
        scale = "" if kernel.scale is None else rf"{_number(kernel.scale)}\,"
        return rf"{scale}{cosine}" + (r"\,e^{m_i}" if mass else "")
    scale = r"\sqrt{d_k}" if kernel.scale is None else _number(kernel.scale)
    return rf"\exp({scale}\,({cosine} - 1){mass})"


def _factors(monoid: Monoid) -> tuple[Monoid, ...]:
    return monoid.parts if isinstance(monoid, monoids.Product) else (monoid,)


__all__ = ["equations", "kept", "predicted", "primal", "rate", "residual"]
