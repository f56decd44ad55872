"""One self-contained HTML page: tables, the heat map, curves, and every pair of tuples side by side.

A function of transfer.json alone.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

from axes.transfer import pictures, words

_STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 18%, transparent); }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 76rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .3rem; }
.warn { border-left: .3rem solid #bf8700; padding: .3rem .8rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .6rem; text-align: left; vertical-align: top; }
.scroll { overflow-x: auto; } .scroll table { overflow-wrap: normal; min-width: 52rem; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 0 1.2rem; }
.pair h3 { font-size: .95rem; margin: .6rem 0 .2rem; } .pair b { display: block; font-size: .85rem; opacity: .75; }
.pair div { margin-bottom: .4rem; } dt { font-weight: 600; font-size: .85rem; } dd { margin: 0 0 .4rem; }
code { font: .85em/1.4 ui-monospace, monospace; } .same code { opacity: .6; }
mark { background: #ffe58a; color: #222; border-radius: .2rem; padding: 0 .15rem; }
.v { border-left: .3rem solid var(--c); padding-left: .5rem; --c: #8c959f; }
.helps { --c: #1a7f37; } .hurts { --c: #cf222e; } .equivalent { --c: #2da4a0; } .undecided { --c: #bf8700; }
figure { margin: 1.5rem 0; overflow-x: auto; }
figure img { max-width: 100%; min-width: 38rem; height: auto; background: white; }
.cost { font-size: .9em; opacity: .85; } .bar { position: relative; height: 1.3rem; margin: .2rem 0; max-width: 30rem; }
.bar i { position: absolute; top: 0; bottom: 0; } .bar .margin { background: var(--line); }
.bar .interval { top: .45rem; bottom: .45rem; background: currentColor; border-radius: .2rem; min-width: 2px; }
.bar .zero { width: 1px; background: currentColor; }
@media (max-width: 640px) {
  .pair { grid-template-columns: 1fr; } .pair h3 { display: none; }
  .pair div:nth-of-type(odd) b::after { content: " of the arm"; }
  .pair div:nth-of-type(even) b::after { content: " of the control"; }
  .scroll table { min-width: 0; } .scroll thead { display: none; }
  .scroll tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--line); }
  .scroll td { display: grid; grid-template-columns: 8rem 1fr; gap: .6rem; overflow-wrap: anywhere; }
  .scroll td { border: 0; padding: .1rem 0; }
  .scroll td::before { content: attr(data-column); opacity: .75; }
}
"""


def page(results: Mapping[str, Any]) -> str:
    """One HTML page without any external resource: table, heat map, curves, and every pair side by side."""
    e = html.escape
    how = "".join(
        f"<dt>{e(name)}</dt>{''.join(f'<dd>{e(text)}</dd>' for text in texts)}" for name, texts in words.how(results)
    )
    out = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>Transfer between axes</title><style>{_STYLE}</style></head><body>",
        "<h1>A method of one axis, tried on another</h1>",
    ]
    if results["verdicts"]:
        out.append(f'<p class="warn">{e(results["verdicts"][:1].upper() + results["verdicts"][1:])}.</p>')
    out += [f"<p>{e(words.method(results))}</p><details><summary>how it was made</summary><dl>{how}</dl></details>"]
    head = ("calibration", *words.CALIBRATION[1:])
    out.append(_table(head, [tuple(map(e, words.calibration(c))) for c in results["calibrations"]]))
    if said := words.summary(results):
        out.append("<h2>In plain words</h2><ul>" + "".join(f"<li>{e(line)}</li>" for line in said) + "</ul>")
    if rows := words.published(results):
        table = _table(
            words.CLAIMS, [(_jump(x), *map(e, (*texts, *words.effect(c))), _badge(c)) for x, c, texts in rows]
        )
        out.append(f"<h2>What is published, and what was measured</h2><p>{e(words.PUBLISHED)}</p>{table}")
    columns = ("id", "task", "arm", "control", "effect", "95 %", "p, Holm", "verdict", "FLOPs", "state", "ms")
    out.append("<h2>Comparisons</h2>" + _table(columns, [
        (_jump(x), e(c["task"]), e(words.mean(c, "arm")), e(words.mean(c, "control")),
         *map(e, words.effect(c)), e(words.holm(c)), _badge(c), *words.costs(c))
        for x in results["experiments"] for c in x["compared"]
    ]))  # fmt: skip
    for title, figure in (
        ("Effects; hatched where interval and margin overlap", pictures.heat_map(results)),
        ("Training loss of arm and control, thin lines a seed each", pictures.curves(results)),
    ):
        out.append(
            f'<figure><img alt="{e(title)}" src="{pictures.data_url(figure)}">'
            f"<figcaption>{e(title)}</figcaption></figure>"
        )
    out += [_section(x, results) for x in results["experiments"]]
    return "\n".join([*out, "</body></html>"]) + "\n"


def _jump(x: Mapping[str, Any]) -> str:
    return f'<a href="#{html.escape(x["id"])}">{html.escape(x["id"])}</a>'


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Cells are HTML already. On a narrow screen a row is a list, and each cell says its column."""
    named = [[f'<td data-column="{name}">{cell}</td>' for name, cell in zip(head, row, strict=True)] for row in rows]
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in named)
    top = "".join(f"<th>{cell}</th>" for cell in head)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _badge(c: Mapping[str, Any]) -> str:
    verdict = words.verdict(c)
    return f'<span class="v {verdict}">{verdict}</span>' if verdict != "–" else "–"


def _section(x: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """An experiment: its pair of tuples, its intervals, its costs."""
    e = html.escape
    cells = ["<h3>arm</h3><h3>control</h3>"]
    for field, texts in words.fields(x):
        moved = [pair for pair in x["moved"] if re.split(r"[.\[]", pair[0])[0] == field]
        kind = "same" if texts[0] == texts[1] else "moved"
        for text, parts in zip(texts, ([m[2] for m in moved], [m[1] for m in moved]), strict=True):
            cells.append(f'<div class="{kind}"><b>{field}</b><code>{_marked(text, parts)}</code></div>')
    found = []
    for c in x["compared"]:
        (effect, interval), unit = words.effect(c), words.UNIT[c["metric"]]
        line = f"<b>{e(c['task'])}</b>: {e(effect)} {e(unit)} {e(interval and f'({interval})')} {_badge(c)}"
        by = "".join(f"<br>{what}, arm / control: {e(words.listed(values))}" for what, values in words.by(c))
        cost = f"{e(words.said(c, results))} {e(words.counted(c))}{by}"
        found.append(f'<p>{line}</p>{_bar(c, x["margin"])}<p class="cost">{cost}</p>')
    return (
        f'<h2 id="{e(x["id"])}">{e(x["id"])}: {e(x["question"])}</h2>'
        f"<p>From <code>{e(x['source'])}</code>, onto the axis {e(x['axis'])}; {e('; '.join(words.beside(x)))}.</p>"
        f'<div class="pair">{"".join(cells)}</div>{"".join(found)}'
    )


def _marked(text: str, parts: list[str]) -> str:
    """A field's text with what moved marked: each part where it stands once, else the whole."""
    safe, hits = html.escape(text), [html.escape(p) for p in parts]
    if not hits:
        return safe
    if any(safe.count(p) != 1 for p in hits):
        return f"<mark>{safe}</mark>"
    for p in hits:
        safe = safe.replace(p, f"<mark>{p}</mark>")
    return safe


def _bar(c: Mapping[str, Any], margin: float) -> str:
    """The interval on a line, with the margin grey around zero."""
    if "effect" not in c:
        return ""
    reach = 1.15 * max(abs(c["low"]), abs(c["high"]), 2 * margin)

    def at(value: float) -> float:
        return 50.0 + 50.0 * value / reach

    low, high = at(c["low"]), at(c["high"])
    return (
        f'<div class="bar"><i class="margin" style="left:{at(-margin):.1f}%;width:{at(margin) - at(-margin):.1f}%"></i>'
        f'<i class="zero" style="left:50%"></i>'
        f'<i class="interval" style="left:{low:.1f}%;width:{high - low:.1f}%"></i></div>'
    )
