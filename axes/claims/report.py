"""Reports of a verified register: docs/claims.md, a machine-readable file, and one self-contained HTML page."""

from __future__ import annotations

import base64
import html
import io
import json
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from axes.claims.base import Finding, Result, Verdict
from axes.claims.register import GROUPS

_STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 18%, transparent); }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 72rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .5rem; text-align: left; vertical-align: top; }
th { font-weight: 600; } td.n { font-variant-numeric: tabular-nums; }
.ok::before { content: "\\2713 "; color: #1a7f37; } .bad::before { content: "\\2717 "; color: #cf222e; }
.scroll { overflow-x: auto; } figure { margin: 1.2rem 0; }
figure img { max-width: 100%; height: auto; background: #fff; }
details > summary { cursor: pointer; } .quiet { opacity: .75; font-size: .92em; }
pre { white-space: pre-wrap; }
@media (max-width: 640px) {
  table.claims thead { display: none; }
  table.claims tr { display: block; border-bottom: 1px solid var(--line); padding: .5rem 0; }
  table.claims td { display: block; border: 0; padding: .1rem 0; }
}
"""


def write_atomically(path: Path, text: str) -> None:
    """Write beside, then rename: a full disk leaves the old file."""
    beside = path.with_name(path.name + ".part")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def as_json(results: Sequence[Result]) -> str:
    """Every claim with its findings, for programs."""
    rows = [
        {
            "id": r.claim.id,
            "statement": r.claim.statement,
            "verdict": str(r.claim.verdict),
            "verified": r.ok,
            "conditions": r.claim.conditions,
            "correction": r.claim.correction,
            "instance": r.claim.instance,
            "source": str(r.claim.source),
            "seconds": round(r.seconds, 4),
            "error": r.error,
            "findings": [
                {
                    "role": f.role,
                    "what": f.what,
                    "measured": _finite(f.measured),
                    "low": _finite(f.low),
                    "high": _finite(f.high),
                    "ok": f.ok,
                }
                for f in r.findings
            ],
        }
        for r in results
    ]
    return json.dumps({"environment": _environment(), "claims": rows}, indent=1, ensure_ascii=False) + "\n"


def _finite(x: float) -> float | str:
    return x if math.isfinite(x) else str(x)


def _environment() -> dict[str, str]:
    return {"torch": torch.__version__.split("+")[0], "python": platform.python_version()}


def counts_table(results: Sequence[Result]) -> list[list[str]]:
    """Group, one column a verdict, total; the last row sums up."""
    verdicts = list(Verdict)
    rows = [["group", *map(str, verdicts), "all"]]
    groups = [g for g in GROUPS if any(r.claim.group == g for r in results)]
    for g in groups:
        mine = [r for r in results if r.claim.group == g]
        rows.append(
            [f"{g}. {GROUPS[g]}", *(str(sum(r.claim.verdict is v for r in mine)) for v in verdicts), str(len(mine))]
        )
    rows.append(["all", *(str(sum(r.claim.verdict is v for r in results)) for v in verdicts), str(len(results))])
    return rows


def markdown(results: Sequence[Result]) -> str:
    """docs/claims.md: statements and verdicts, without the run's numbers, so that it only changes with the register."""
    lines = ["# Claims of the literature, checked", ""]
    lines += ["Rendered by `axes verify --docs`; `axes verify` runs every check, `axes explain A01` prints one.", ""]
    head, *rows = counts_table(results)
    lines += [
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
        *("| " + " | ".join(r) + " |" for r in rows),
        "",
    ]
    for g, title in GROUPS.items():
        mine = [r for r in results if r.claim.group == g]
        if not mine:
            continue
        lines += [f"## {g}. {title}", ""]
        for r in mine:
            c = r.claim
            lines += [f"### {c.id} · {c.verdict}", "", c.statement, ""]
            lines += [f"- {name}: {text}" for name, text in _facts(r)]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _facts(r: Result) -> list[tuple[str, str]]:
    c = r.claim
    facts = [("conditions", c.conditions), ("true instead", c.correction), ("why", " ".join(c.derivation.split()))]
    facts += [("not testable because", c.reason), ("checked through", c.instance), ("source", str(c.source))]
    return [(name, text) for name, text in facts if text and not (name == "checked through" and c.reason)]


def page(results: Sequence[Result]) -> str:
    """One HTML page without any external resource: counts, claims with measured numbers, figures."""
    from axes.claims.figures import FIGURES

    e = html.escape
    verified, testable = sum(r.ok for r in results if r.claim.check), sum(r.claim.check is not None for r in results)
    env = ", ".join(f"{k} {v}" for k, v in _environment().items())
    out = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width, initial-scale=1">',
        f"<title>Claims, checked</title><style>{_STYLE}</style></head><body>",
        "<h1>Optimizers, sequence layers, depth mixers: the literature's claims, checked</h1>",
        f"<p>{verified} of {testable} testable claims hold their verdict ({len(results)} in the register). {e(env)}.</p>",
        "<div class=scroll><table>",
    ]
    head, *rows = counts_table(results)
    out.append("<thead><tr>" + "".join(f"<th>{e(h)}</th>" for h in head) + "</tr></thead><tbody>")
    out += ["<tr>" + "".join(f"<td>{e(x)}</td>" for x in row) + "</tr>" for row in rows]
    out.append("</tbody></table></div>")
    shown = {r.claim.figure for r in results}
    for figure in FIGURES:
        if figure.name in shown:
            image = f"<img alt={_attribute(figure.title)} src={_attribute(_png(figure))}>"
            out.append(f"<figure>{image}<figcaption>{e(figure.caption)}</figcaption></figure>")
    for g, title in GROUPS.items():
        mine = [r for r in results if r.claim.group == g]
        if mine:
            columns = "<th>claim<th>statement<th>verdict<th>measured"
            out.append(f"<h2>{g}. {e(title)}</h2><table class=claims><thead><tr>{columns}</tr></thead><tbody>")
            out += [_row(r) for r in mine]
            out.append("</tbody></table>")
    return "\n".join([*out, "</body></html>"]) + "\n"


def _row(r: Result) -> str:
    e, c = html.escape, r.claim
    facts = "".join(f"<dt>{e(n)}</dt><dd>{e(t)}</dd>" for n, t in _facts(r))
    found = "".join(f"<div class={'ok' if f.ok else 'bad'}>{e(str(f))}</div>" for f in r.findings)
    if r.error:
        found += f"<div class=bad><pre>{e(r.error)}</pre></div>"
    more = f"<details><summary class=quiet>details</summary><dl>{facts}</dl></details>"
    return (
        f"<tr id={c.id}><td><b>{c.id}</b></td><td>{e(c.statement)}{more}</td>"
        f"<td>{e(str(c.verdict))}</td><td class=n>{found or '–'}</td></tr>"
    )


def _attribute(text: str) -> str:
    return '"' + html.escape(text, quote=True) + '"'


def _png(figure: object) -> str:
    """A figure as a data URL."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    picture, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    try:
        figure.draw(axis)  # type: ignore[attr-defined]
        axis.set_title(figure.title)  # type: ignore[attr-defined]
        buffer = io.BytesIO()
        picture.savefig(buffer, format="png", dpi=110, metadata={"Software": ""})
    finally:
        pyplot.close(picture)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def summary(f: Finding | None) -> tuple[str, str]:
    """Measured number and its bound, for a table."""
    if f is None:
        return "–", "–"
    bound = (
        f"≤ {f.high:.1g}"
        if f.role == "holds"
        else f"≥ {f.low:.1g}"
        if f.role == "breaks"
        else f"{f.low:.3g} … {f.high:.3g}"
    )
    return f"{f.measured:.2e}" if f.role != "within" else f"{f.measured:.4g}", bound
