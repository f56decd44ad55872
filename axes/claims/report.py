"""Reports of a verified register: docs/claims.md, a machine-readable file, and one self-contained HTML page."""

from __future__ import annotations

import base64
import html
import io
import json
import math
import platform
import re
from collections.abc import Sequence

import torch

from axes.claims.base import Claim, Finding, Result, Verdict
from axes.claims.figures.figure import Figure
from axes.claims.register import counts, groups

_STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 18%, transparent); }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 76rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: 1rem 0; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .4rem .6rem; text-align: left; vertical-align: top; }
.scroll { overflow-x: auto; margin-bottom: 2rem; } table.counts { overflow-wrap: normal; min-width: 46rem; }
.counts td:not(:first-child), .counts th:not(:first-child) { text-align: right; }
.counts tr:last-child { font-weight: 600; }
table.claims { table-layout: fixed; }
.claims th:nth-child(1) { width: 4.5rem; } .claims th:nth-child(3) { width: 9rem; }
.claims th:nth-child(4) { width: 40%; }
.n { font-size: .9em; font-variant-numeric: tabular-nums; }
.n div { padding-left: 1.2em; text-indent: -1.2em; }
.ok::before { content: "\\2713  "; color: #1a7f37; } .bad::before { content: "\\2717  "; color: #cf222e; }
.v { display: block; border-left: .3rem solid var(--c); padding-left: .5rem; --c: #8c959f; }
.exact { --c: #1a7f37; } .conditional { --c: #2da4a0; } .false { --c: #cf222e; }
.approximate { --c: #bf8700; } .statistical { --c: #8250df; }
.figures { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
figure { margin: 0; } figure img { display: block; width: 100%; height: auto; }
figcaption, details { opacity: .85; font-size: .92em; }
summary { cursor: pointer; } dl { margin: .3rem 0; } dt { font-weight: 600; } dd { margin: 0 0 .3rem; }
pre { white-space: pre-wrap; margin: 0; }
@media (max-width: 640px) {
  table.claims thead { display: none; }
  table.claims, .claims tbody, .claims tr, .claims td { display: block; width: auto; }
  .claims tr { border-bottom: 1px solid var(--line); padding: .6rem 0; }
  .claims td { border: 0; padding: .1rem 0; }
}
"""


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


def counts_table(claims: Sequence[Claim]) -> list[list[str]]:
    """Group, one column a verdict, total; the last row sums up."""
    tally = counts(claims)
    rows = [["group", *map(str, Verdict), "all"]]
    for g, title in groups().items():
        numbers = list(tally[g].values())
        if any(numbers):
            rows.append([f"{g}. {title}", *map(str, numbers), str(sum(numbers))])
    sums = [sum(row[v] for row in tally.values()) for v in Verdict]
    return [*rows, ["all", *map(str, sums), str(sum(sums))]]


def markdown(claims: Sequence[Claim]) -> str:
    """docs/claims.md: statements and verdicts, without a run's numbers, so that it only changes with the register."""
    lines = ["# Claims of the literature, checked", ""]
    lines += ["Rendered by `axes verify --docs docs/claims.md`; do not edit. `axes verify` runs every check,"]
    lines += ["`axes explain A01` prints one claim with what its check measures now.", ""]
    head, *rows = counts_table(claims)
    lines += [f"| {' | '.join(head)} |", "|" + " --- |" * len(head), *(f"| {' | '.join(r)} |" for r in rows), ""]
    for g, title in groups().items():
        mine = [c for c in claims if c.group == g]
        if mine:
            lines += [f"## {g}. {title}", ""]
        for c in mine:
            lines += [f"### {c.id} · {c.verdict}", "", _literally(c.statement), ""]
            lines += [*(f"- {name}: {_literally(text)}" for name, text in facts(c)), ""]
    return "\n".join(lines).rstrip() + "\n"


def _literally(text: str) -> str:
    """Formulas as they are: what Markdown would take for emphasis, a tag, code or an escape is escaped."""
    return re.sub(r"(?<![A-Za-z0-9])[*_~](?=\S)|(?<=\w)[*~](?=\w)|<(?=[A-Za-z/!?])|[\\`]", r"\\\g<0>", text)


_REFUTED = {
    "MATH": "the mathematics is wrong as printed",
    "OVER": "true of less than is claimed",
    "NOTN": "the expression as printed means something else",
    "LABEL": "the label contradicts what follows from the definition",
}


def facts(c: Claim) -> list[tuple[str, str]]:
    """What a claim says of itself beside statement and verdict: name and text, without empty ones."""
    rows = [
        ("conditions", c.conditions),
        ("refuted because", _REFUTED.get(c.kind, "")),
        ("true instead", c.correction),
        ("why", c.derivation),
        ("not testable", c.reason),
        ("checked through", "" if c.reason else c.instance),
        ("source", str(c.source)),
    ]
    return [(name, " ".join(text.split())) for name, text in rows if text]


def page(results: Sequence[Result]) -> str:
    """One HTML page without any external resource: counts, figures, claims with measured numbers."""
    from axes.claims.figures import FIGURES

    e = html.escape
    testable = [r for r in results if r.claim.check is not None]
    failing = [r for r in testable if not r.ok]
    env = ", ".join(f"{k} {v}" for k, v in _environment().items())
    present = {g: title for g, title in groups().items() if any(r.claim.group == g for r in results)}
    out = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',  # else a server's page asks for /favicon.ico
        f"<title>Claims, checked</title><style>{_STYLE}</style></head><body>",
        "<h1>Optimizers, sequence layers, depth mixers: the literature’s claims, checked</h1>",
        f"<p>{len(testable) - len(failing)} of {len(testable)} testable claims hold their verdict; "
        f"{len(results)} claims in all. {e(env)}.</p>",
        *(f'<p class="bad">{_link(r.claim.id)} does not hold its verdict.</p>' for r in failing),
        "<nav>" + "".join(f'<a href="#group-{g}">{g}. {e(title)}</a>' for g, title in present.items()) + "</nav>",
        _counts([r.claim for r in results]),
        '<div class="figures">',
    ]
    for figure in FIGURES:
        shows = [r.claim.id for r in results if r.claim.figure == figure.name]
        if shows:
            out.append(f"<figure><img alt={_attribute(figure.title)} src={_attribute(_png(figure))}>")
            out.append(f"<figcaption>{e(figure.caption)} Claims {', '.join(map(_link, shows))}.</figcaption></figure>")
    out.append("</div>")
    for g, title in present.items():
        head = "".join(f"<th>{name}</th>" for name in ("id", "statement", "verdict", "measured"))
        out.append(f'<h2 id="group-{g}">{g}. {e(title)}</h2>')
        out.append(f'<table class="claims"><thead><tr>{head}</tr></thead><tbody>')
        out += [_row(r) for r in results if r.claim.group == g]
        out.append("</tbody></table>")
    return "\n".join([*out, "</body></html>"]) + "\n"


def _link(id: str) -> str:
    return f'<a href="#{id}">{id}</a>'


def _counts(claims: Sequence[Claim]) -> str:
    head, *rows = [[html.escape(x) for x in row] for row in counts_table(claims)]
    lines = ["".join(f"<th>{x}</th>" for x in head), *("".join(f"<td>{x}</td>" for x in row) for row in rows)]
    top, *rest = (f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table class="counts"><thead>{top}</thead><tbody>{"".join(rest)}</tbody></table></div>'


def _row(r: Result) -> str:
    e, c = html.escape, r.claim
    more = "".join(f"<dt>{e(name)}</dt><dd>{e(text)}</dd>" for name, text in facts(c))
    found = "".join(f'<div class="{"ok" if f.ok else "bad"}">{e(str(f))}</div>' for f in r.findings)
    if r.error:
        found += f'<pre class="bad">{e(r.error)}</pre>'
    statement = f"{e(c.statement)}<details><summary>details</summary><dl>{more}</dl></details>"
    return (
        f'<tr id="{c.id}"><td><b>{c.id}</b></td><td>{statement}</td>'
        f'<td><span class="v {c.verdict.name.lower()}">{c.verdict}</span></td><td class="n">{found or "–"}</td></tr>'
    )


def _attribute(text: str) -> str:
    return '"' + html.escape(text, quote=True) + '"'


def _png(figure: Figure) -> str:
    """A figure as a data URL."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    picture, axis = pyplot.subplots(figsize=(6, 3.8), layout="constrained")
    try:
        figure.draw(axis)
        axis.set_title(figure.title)
        buffer = io.BytesIO()
        picture.savefig(buffer, format="png", dpi=120, metadata={"Software": ""})
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
