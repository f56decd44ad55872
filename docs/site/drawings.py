"""The drawings of the documentation: `python docs/site/drawings.py` writes docs/figures/*.svg, a test compares them.

They look like docs/architecture.svg. What a geometry does is computed by the package: a grid of dual points theta, and
where grad h* takes it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from axes.core import geometry as g
from axes.core.geometry import Geometry

FIGURES = Path(__file__).resolve().parents[1] / "figures"
STYLE = """
    .page { fill: #ffffff; }
    .box { stroke-width: 1.5; }
    .low { fill: #e4e9f0; stroke: #64748b; }
    .core { fill: #fcecc0; stroke: #b7791f; }
    .routes { fill: #dbeafc; stroke: #2b6cb0; }
    .axis { fill: #d8f1e2; stroke: #2f855a; }
    .job { fill: #f8e0e6; stroke: #a8325e; }
    .name { font: 600 17px ui-monospace, 'DejaVu Sans Mono', Menlo, monospace; fill: #1a202c; text-anchor: middle; }
    .says { font-size: 14px; fill: #2d3748; text-anchor: middle; }
    .left { text-anchor: start; }
    .right { text-anchor: end; }
    .math { font: italic 17px 'STIX Two Text', 'DejaVu Serif', Georgia, serif; fill: #1a202c; text-anchor: middle; }
    .arrow { fill: none; stroke: #808a99; stroke-width: 2; marker-end: url(#head); }
    .back { stroke-dasharray: 6 5; }
    .grid { fill: none; stroke: #2b6cb0; stroke-width: 1.2; stroke-opacity: 0.75; }
    .turn { fill: none; stroke: #a8325e; stroke-width: 1.2; stroke-opacity: 0.75; }
    .edge { fill: none; stroke: #b7791f; stroke-width: 2; }
    .cross { stroke: #cbd2dc; stroke-width: 1; }
    .dot { fill: #1a202c; }
"""
HEAD = (
    '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 L10 5 L0 10 z" fill="#808a99"/></marker>'
)


def page(width: int, height: int, title: str, *shapes: str) -> str:
    body = "\n".join(f"  {shape}" for shape in shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        "font-family=\"system-ui, 'Segoe UI', Helvetica, Arial, sans-serif\" role=\"img\" aria-labelledby=\"title\">\n"
        f'  <title id="title">{title}</title>\n  <style>{STYLE}  </style>\n  <defs>{HEAD}</defs>\n'
        f'  <rect class="page" width="{width}" height="{height}" rx="8"/>\n{body}\n</svg>\n'
    )


def box(x: int, y: int, w: int, h: int, kind: str) -> str:
    return f'<rect class="box {kind}" x="{x}" y="{y}" width="{w}" height="{h}" rx="6"/>'


def text(x: float, y: float, words: str, kind: str = "says") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{words}</text>'


def arrow(path: str, kind: str = "") -> str:
    return f'<path class="{("arrow " + kind).strip()}" d="{path}"/>'


def sub(letter: str, index: str) -> str:
    return f'{letter}<tspan font-size="12" dy="4">{index}</tspan><tspan dy="-4">&#8203;</tspan>'


# ---- the three axes --------------------------------------------------------------------------------------------------


def three_axes() -> str:
    rows = (
        ("training step", "the weights of a network", "a gradient", "W", "t"),
        ("token", "the memory of a sequence", "a key and a value", "S", "t"),
        ("layer", "residual streams", "what a sublayer says", "X", "l"),
    )
    shapes = []
    for i, (what, held, given, letter, index) in enumerate(rows):
        y = 16 + 160 * i
        shapes += [text(16, y + 20, what, "name left"), text(556, y + 20, held, "says right")]
        for j in range(3):
            x = 66 + 168 * j
            step = f"{index}{('-1', '', '+1')[j]}"
            shapes += [box(x, y + 42, 84, 44, "core"), text(x + 42, y + 70, "step", "name")]
            shapes += [arrow(f"M{x - 42} {y + 64} H{x - 3}")] if j == 0 else []
            shapes += [arrow(f"M{x + 87} {y + 64} H{x + 165 if j < 2 else x + 152}")]
            label = x + 122 if j < 2 else x + 112  # the last arrow is shorter, and its head is no place for letters
            shapes += [text(label, y + 53, sub(letter, step), "math"), arrow(f"M{x + 42} {y + 118} V{y + 90}")]
            if j == 1:
                shapes.append(text(x + 42, y + 136, given))
    return page(574, 484, "One step, repeated along training steps, along tokens and along layers", *shapes)


# ---- one step --------------------------------------------------------------------------------------------------------


def one_step() -> str:
    shapes = [
        # the state's way
        box(24, 40, 110, 58, "low"),
        text(79, 64, sub("θ", "t-1"), "math"),
        text(79, 86, "old state"),
        arrow("M137 69 H197"),
        box(200, 40, 110, 58, "axis"),
        text(255, 64, "monoid", "name"),
        text(255, 86, f"keeps: {sub('A', 't')}"),
        arrow("M313 69 H403"),
        '<circle class="box low" cx="422" cy="69" r="17"/>',
        text(422, 75, "+", "name"),
        arrow("M441 69 H527"),
        box(530, 40, 96, 58, "low"),
        text(578, 64, sub("θ", "t"), "math"),
        text(578, 86, "new state"),
        arrow("M578 101 V154"),
        box(518, 157, 120, 58, "routes"),
        text(578, 181, "h", "name"),
        text(578, 203, f"{sub('W', 't')} = ∇h*({sub('θ', 't')})"),
        arrow("M641 186 H712"),
        text(680, 178, "read"),
        # the drive's way
        arrow("M422 154 V90"),
        box(352, 157, 140, 58, "axis"),
        text(422, 181, "algorithm", "name"),
        text(422, 203, "rate, filters"),
        arrow("M298 186 H349"),
        text(324, 177, sub("u", "t"), "math"),
        box(176, 157, 120, 58, "job"),
        text(236, 181, "cost", "name"),
        text(236, 203, f"{sub('u', 't')} = −∇ℓ"),
        arrow("M146 186 H173"),
        text(84, 180, "a datum:"),
        text(84, 200, f"{sub('k', 't')}, {sub('v', 't')} or {sub('g', 't')}"),
        # feedback
        arrow("M578 218 V272 H236 V219", "back"),
        box(350, 252, 114, 40, "core"),
        text(407, 278, "memory", "name"),
        text(407, 312, "what the weights predict for the datum, at the step before (or after: implicit)"),
    ]
    title = "One step: what is kept of the old state, plus what the cost asks for, read through h"
    return page(740, 330, title, *shapes)


# ---- geometries ------------------------------------------------------------------------------------------------------

SIZE, MIDDLE = 220, 110
Flat = Callable[[Tensor], Tensor]


def plane(h: Geometry) -> Flat:
    """Two entries as they are."""
    return lambda theta: h.primal(theta[:, None, :])[:, 0, :]


def simplex(theta: Tensor) -> Tensor:
    """Three entries with one mass, drawn in their triangle; the third theta is 0."""
    w = g.Entropic("row").primal(torch.cat((theta, torch.zeros_like(theta[:, :1])), -1)[:, None, :])[:, 0, :]
    corners = torch.tensor([[-1.0, -0.8], [1.0, -0.8], [0.0, 0.93]], dtype=theta.dtype)
    return w @ corners


def lines(reach: float) -> Iterator[tuple[str, Tensor]]:
    """Circles and rays of the dual plane."""
    angle = torch.linspace(0, 2 * torch.pi, 121, dtype=torch.float64)
    round_ = torch.stack((angle.cos(), angle.sin()), -1)
    for i in range(1, 5):
        yield "grid", reach * i / 4 * round_
    far = torch.linspace(0.004, 1, 60, dtype=torch.float64)[:, None]
    for i in range(16):
        # a little off the diagonals and axes, where links that branch would leave the choice to rounding
        a = torch.tensor(2 * torch.pi * (i + 0.02) / 16, dtype=torch.float64)
        yield "turn", reach * far * torch.stack((a.cos(), a.sin()))


CROSS = f'<path class="cross" d="M8 {MIDDLE} H{SIZE - 8} M{MIDDLE} 8 V{SIZE - 8}"/>'


def path(w: Tensor, zoom: float) -> str:
    return "M" + " L".join(f"{MIDDLE + zoom * float(x):.1f} {MIDDLE - zoom * float(y):.1f}" for x, y in w)


def panel(title: str, image: Flat, reach: float, edge: str, zoom: float) -> str:
    """Where the lines of the dual plane come to lie."""
    drawn = [f'<path class="{kind}" d="{path(image(theta), zoom)}"/>' for kind, theta in lines(reach)]
    return page(SIZE, SIZE, title, CROSS, *((edge,) if edge else ()), *drawn)


def scatter(title: str, image: Flat, reach: float, edge: str, zoom: float) -> str:
    """Where single points go, of links that leave few of them: from theta along the line to the dot."""
    angle = torch.arange(20, dtype=torch.float64) * 2 * torch.pi / 20 + 0.1
    radius = reach * torch.tensor([0.45, 1.0, 0.7, 1.2], dtype=torch.float64).repeat(5)
    theta = radius[:, None] * torch.stack((angle.cos(), angle.sin()), -1)
    drawn = []
    for start, end in zip(theta, image(theta), strict=True):
        drawn.append(f'<path class="turn" d="{path(torch.stack((start, end)), zoom)}"/>')
        x, y = MIDDLE + zoom * float(end[0]), MIDDLE - zoom * float(end[1])
        drawn.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>')
    return page(SIZE, SIZE, title, CROSS, edge, *drawn)


def square(half: float, zoom: float) -> str:
    return f'<rect class="edge" x="{MIDDLE - half * zoom:g}" y="{MIDDLE - half * zoom:g}" ' + (
        f'width="{2 * half * zoom:g}" height="{2 * half * zoom:g}"/>'
    )


def circle(zoom: float) -> str:
    return f'<circle class="edge" cx="{MIDDLE}" cy="{MIDDLE}" r="{zoom:g}"/>'


def geometries() -> Iterator[tuple[str, str]]:
    triangle = '<path class="edge" d="M30 174 L190 174 L110 35.6 z"/>'
    cube = f'<rect class="edge" x="{MIDDLE}" y="20" width="90" height="90"/>'
    yield "euclidean", panel("Euclidean: the identity", plane(g.Euclidean()), 1.0, "", 95)
    yield "entropic", panel("Entropic: the plane lands inside a simplex", simplex, 5.0, triangle, 80)
    yield "bounded", panel("Bounded: the plane lands inside a cube", plane(g.Bounded()), 5.0, cube, 90)
    yield "hypentropy", panel("Hypentropy: far points go exponentially far", plane(g.Hypentropy()), 2.0, "", 27)
    yield "lq", panel("l_q: large entries win", plane(g.Lq(4.0)), 1.0, "", 90)
    soft = plane(g.SoftThreshold(0.3))
    yield "soft-threshold", panel("Soft threshold: small entries become zero", soft, 1.0, "", 125)
    yield "sphere", scatter("Sphere: only the direction is left", plane(g.Sphere("rows")), 1.0, circle(75), 75)
    yield "sign-ball", scatter("Sign ball: only the corners are left", plane(g.SignBall()), 1.0, square(1, 75), 75)
    yield "ball", scatter("Ball: what is outside comes to the border", plane(g.Ball(0.8)), 1.0, circle(60), 75)


def drawings() -> dict[str, str]:
    """Every drawing by the name of its file."""
    found = {"axes.svg": three_axes(), "step.svg": one_step()}
    return found | {f"h-{name}.svg": drawing for name, drawing in geometries()}


def main(arguments: Sequence[str]) -> None:
    folder = Path(arguments[0]) if arguments else FIGURES
    folder.mkdir(exist_ok=True)
    for name, drawing in drawings().items():
        (folder / name).write_text(drawing, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
