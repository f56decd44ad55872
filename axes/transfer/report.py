"""What results say, for people: tables on a terminal, docs/transfer.md, and one self-contained HTML page.

All of it is a function of transfer.json alone.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from axes.transfer import findings, pictures

_UNIT = {"accuracy": "accuracy", "bits per byte": "bits a byte", "explained": "share explained"}
_MEANS = {
    "helps": "The whole interval is above the margin: it helps.",
    "hurts": "The whole interval is below the margin: it hurts.",
    "equivalent": "The whole interval is within the margin: it makes no difference that matters.",
    "undecided": "The interval and the margin overlap: these runs do not say.",
}


def tables(results: Mapping[str, Any]) -> Iterator[Table]:
    """Calibrations, then comparisons with what they cost."""
    table = Table("calibration", "task", "effect", "95 %", "as it must be", title="must come out as known")
    for c in results["calibrations"]:
        table.add_row(c["id"], c["task"], *_effect(c), _outcome(c))
    yield table
    head = ("", "task", "arm", "control", "effect", "95 %", "Holm p", "verdict", "FLOPs", "state", "ms")
    table = Table(*head, title="arm less control, positive where the arm is better; costs are arm over control")
    for e in results["experiments"]:
        for c in e["compared"]:
            row = (
                e["id"],
                c["task"],
                _mean(c, "arm"),
                _mean(c, "control"),
                *_effect(c),
                _p(c),
                _verdict(c),
                *_costs(c),
            )
            table.add_row(*map(escape, row))
    yield table


def compared(results: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every comparison, those that calibrate first."""
    yield from results["calibrations"]
    for e in results["experiments"]:
        yield from e["compared"]


def notes(results: Mapping[str, Any]) -> list[str]:
    """What went otherwise than it was asked for, and in how many runs."""
    found = Counter((run["task"], run["system"], run.get("note", "")) for run in results["runs"])
    return [f"{task}-{system}: {note} ({n} runs)" for (task, system, note), n in found.items() if note]


# ---- what both pages say -------------------------------------------------------------------------------------------


def _effect(c: Mapping[str, Any]) -> tuple[str, str]:
    if "effect" not in c:
        return f"{c['missing']} runs to go", ""
    return f"{c['effect']:+.3f}", f"{c['low']:+.3f} … {c['high']:+.3f}"


def _mean(c: Mapping[str, Any], side: str) -> str:
    values = list(c[side]["values"].values())
    if not values:
        return "–"
    broke = c[side]["broke"]
    return f"{sum(values) / len(values):.3f}" + (f" ({broke} broke down)" if broke else "")


def _p(c: Mapping[str, Any]) -> str:
    return f"{c['holm']:.2f}" if c.get("holm") is not None else "–"


def _verdict(c: Mapping[str, Any]) -> str:
    return c.get("verdict") or "–"


def _costs(c: Mapping[str, Any]) -> tuple[str, str, str]:
    """FLOPs, bytes of state and milliseconds of the arm over those of the control."""
    return tuple(_ratio(c["arm"].get(k), c["control"].get(k)) for k in ("flops", "state", "step_ms"))  # type: ignore[return-value]


def _ratio(a: float | None, c: float | None) -> str:
    return "–" if not a or not c else f"{a / c:.2f}"


def _counted(c: Mapping[str, Any]) -> str:
    """The absolute numbers behind the ratios."""
    parts = []
    for side in ("arm", "control"):
        s = c[side]
        if "lr" in s:
            parts.append(
                f"{side}: lr {s['lr']:g}{_edge(s)}, {s['parameters']:,} parameters, {s['seen']:,} tokens or examples, "
                f"{s['flops']:,.0f} FLOPs each, {s['state']:,} bytes of state, {s['step_ms']:.1f} ms a step"
            )
    return "; ".join(parts)


def _edge(side: Mapping[str, Any]) -> str:
    rates = [lr for lr, _ in side["swept"]]
    return " (an end of its grid)" if rates and side["lr"] in (min(rates), max(rates)) else ""


def _by(c: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, float, float]]]]:
    """The metric of arm and control by length, by pairs, by position."""
    arm, control = (c[side].get("by", {}) for side in ("arm", "control"))
    shared = [kind for kind in ("length", "pairs", "position") if kind in arm and kind in control]
    return [(kind, [(n, v, control[kind][n]) for n, v in arm[kind].items() if n in control[kind]]) for kind in shared]


def _how(results: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Where results come from; several commands, commits, days or GPUs may have filled a folder."""
    seeds = f"{results['seeds']} that are compared, one more for learning rates; {len(results['runs'])} runs"
    rows = [
        ("commands", results["command"].split("; ") if results["command"] else ["from Python"]),
        ("versions", results["version"].split("; ")),
        ("dates", results.get("date", "").split("; ")),
        ("hardware", [f"{results['hardware']}, device {results['device']}"]),
        ("software", [f"torch {results['torch']}, Python {results['python']}"]),
        ("seeds", [seeds]),
    ]
    return [(name, texts) for name, texts in rows if any(texts)]


def _method(results: Mapping[str, Any]) -> str:
    """How it was measured, true of these results."""
    apart = {e["id"]: _apart(e) for e in results["experiments"]}
    further = [f"{name} ({100 * share:.0f} %)" for name, share in apart.items() if share > 0.01]
    sizes = "Parameters agree within 1 %" + (f" but for {', '.join(further)}" if further else "") + ", tokens exactly. "
    beside = (
        "Where something is published of the two, layers stand as their papers have them, each in its own block, so "
        "that more than a tuple may differ. "
        if any("said" in e for e in results["experiments"]) else ""
    )  # fmt: skip
    return _METHOD.format(beside=beside, sizes=sizes)


def _apart(e: Mapping[str, Any]) -> float:
    """By what share the parameters of arm and control differ at most."""
    sizes = [[c[side].get("parameters", 0) for side in ("arm", "control")] for c in e["compared"]]
    return max((abs(a / c - 1) for a, c in sizes if a and c), default=0.0)


_METHOD = (
    "Arm and control differ in what moved alone. {beside}They see the same batches, each at the best learning rate of "
    "its own sweep at a seed that is not compared. The effect is the mean difference over seeds, positive where the "
    "arm is better; its interval is a paired bootstrap, 95 %; p is exact over sign flips, Holm's over the first task "
    "of every experiment. A verdict follows interval and margin. A run that broke down counts as one that knows "
    "nothing. {sizes}FLOPs are those of matrix products, counted; milliseconds were measured while workers ran side by "
    "side, and are the share of one run where a worker replayed several in turn."
)


# ---- docs/transfer.md ----------------------------------------------------------------------------------------------


def markdown(results: Mapping[str, Any]) -> str:
    """docs/transfer.md: a function of a results file, so that it changes only with it."""
    lines = ["# A method of one axis, tried on another", ""]
    lines += ["Rendered from [transfer.json](transfer.json) by `axes.transfer.report.markdown`; do not edit.", ""]
    if results["form"] == "quick":
        lines += [
            "**This is a quick run: small models, few steps, few seeds. It shows that the experiments run, and says "
            "nothing about whether a method helps; so there are no verdicts.** A whole run is "
            "`axes transfer run --device cuda --capture graph --out FOLDER`, one that fits minutes of a GPU has "
            "`--small`; of it `axes transfer report FOLDER --docs FILE` writes this page.", "",
        ]  # fmt: skip
    elif results["verdicts"]:
        lines += [f"**There are {results['verdicts']}.**", ""]
    if results["form"] == "small":
        lines += [
            f"Sizes are small: what is said here is said of {_sizes(results)} that were trained for seconds to minutes "
            "each.", "",
        ]  # fmt: skip
    for name, texts in _how(results):
        lines += (
            [f"- {name}: {_code(texts[0])}"] if len(texts) == 1 else [f"- {name}:", *(f"  - {_code(t)}" for t in texts)]
        )
    lines += ["", _method(results), ""]
    lines += ["## Calibrations", "", "What is known must come out; else no verdict is printed.", ""]
    lines += _rows(
        ("", "what must come out", "task", "arm", "control", "effect", "95 %", "as it must be"),
        [
            (c["id"], c["question"], c["task"], _mean(c, "arm"), _mean(c, "control"), *_effect(c), _outcome(c))
            for c in results["calibrations"]
        ],
    )
    if words := summary(results):
        lines += ["## In plain words", "", *(f"- {line}" for line in words), ""]
    if rows := published(results):
        lines += ["## What is published, and what was measured", "", _PUBLISHED, ""]
        lines += _rows(_CLAIMS, [(_link(e), *texts, *_effect(c), _verdict(c)) for e, c, texts in rows])
    lines += ["## Comparisons", "", "Costs are the arm's over the control's.", ""]
    head = ("", "task", "metric", "arm", "control", "effect", "95 %", "p, Holm", "verdict", "FLOPs", "state", "ms")
    lines += _rows(head, [
        (_link(e), c["task"], _UNIT[c["metric"]], _mean(c, "arm"), _mean(c, "control"),
         *_effect(c), _p(c), _verdict(c), *_costs(c))
        for e in results["experiments"] for c in e["compared"]
    ])  # fmt: skip
    for e in results["experiments"]:
        lines += [f"## {e['id']}: {e['question']}", "", f"From `{e['source']}`, onto the axis {e['axis']}.", ""]
        lines += ["| field | arm | control |", "| --- | --- | --- |"]
        for field, (arm, control) in _fields(e):
            mark = "**" if arm != control else ""
            lines += [f"| {mark}{field}{mark} | {_cell(arm)} | {_cell(control)} |"]
        lines += ["", *(f"- moved: `{path}`, {_code(c)} → {_code(a)}" for path, c, a in e["moved"])]
        lines += [f"- {text}" for text in _beside(e)]
        for c in e["compared"]:
            lines += [f"- {c['task']}: {_said(c, results)} {_counted(c)}."]
            for kind, values in _by(c):
                lines += [f"  - {_UNIT[c['metric']]} by {kind}, arm / control: " + _listed(values)]
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def _listed(values: list[tuple[str, float, float]]) -> str:
    return ", ".join(f"{n}: {a:.3f} / {c:.3f}" for n, a, c in values)


def _said(c: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """In plain words."""
    if "effect" not in c:
        return f"not finished, {c['missing']} runs to go."
    words = [f"{note}{_why(c, results)}." for note in _broke(c)]
    if c["verdict"] is None:
        return " ".join(["no verdict.", *words])
    return " ".join([_MEANS[c["verdict"]], *(["Neither side learned the task."] if _little(c) else []), *words])


def _why(c: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """What a run that broke down said of it, if one of them did."""
    mine = {(c["task"], c[side]["system"]) for side in ("arm", "control")}
    said = (r["note"] for r in results["runs"] if (r["task"], r["system"]) in mine and r["broke"] and r.get("note"))
    note = next(said, "")
    return f" ({note})" if note else ""


def _beside(e: Mapping[str, Any]) -> list[str]:
    """What is not in a tuple."""
    out = [f"differences up to {e['margin']:g} do not matter"]
    if e["schedules"][0] != e["schedules"][1]:
        out.append(
            f"schedule of the learning rate: {e['schedules'][0]} for the arm, {e['schedules'][1]} for the control"
        )
    if e["shared"]:
        out.append("layers share their weights, in arm and control")
    if "said" in e:
        out.append(f"published: {e['said']}")
    return out


def _fields(e: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    for field, arm in e["arm"].items():
        yield field, (arm, e["control"][field])


def _link(e: Mapping[str, Any]) -> str:
    return f"[{e['id']}](#{_anchor(e)})"


def _anchor(e: Mapping[str, Any]) -> str:
    text = f"{e['id']}: {e['question']}".lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def _outcome(c: Mapping[str, Any]) -> str:
    """Whether a calibration came out as it must; that of equals says how."""
    if "effect" not in c:
        return "not known yet"
    return "NO" if not c["holds"] else "yes" if c["verdict"] == "helps" else f"yes, {c['verdict']}"


def _code(text: str) -> str:
    return f"`{text}`"


def _cell(text: str) -> str:
    return _code(text.replace("|", "\\|"))


_LITTLE = 0.15  # accuracy below which both sides know next to nothing


def summary(results: Mapping[str, Any]) -> list[str]:
    """What all comparisons say, one sentence a verdict, what hurts or does nothing as well as what helps."""
    found: dict[str, list[str]] = {}
    for e in results["experiments"]:
        for c in e["compared"]:
            where = f"{e['id']} on {c['task']}"
            if "effect" not in c:
                found.setdefault("missing", []).append(f"{where} ({c['missing']} runs to go)")
            elif c["verdict"]:
                little = c["verdict"] in ("equivalent", "undecided") and _little(c)
                noted = "".join(f"; {note}" for note in (*_broke(c), *_dearer(c)))
                found.setdefault("little" if little else c["verdict"], []).append(
                    f"{where} ({c['effect']:+.3f}{noted})"
                )
    if not any(name in found for name in _MEANS):
        return []
    lines = [f"{word}: {', '.join(found[name])}." for name, word in _WORDS.items() if name in found]
    return [*lines, *findings.found(results), *_uncorrected(results)]


_WORDS = {
    "helps": "Helps", "hurts": "Hurts", "equivalent": "Makes no difference that matters",
    "undecided": "Not decided by these runs", "little": "Says nothing, since neither side learned the task",
    "missing": "Not finished",
}  # fmt: skip
_DEAR = 1.5  # times the FLOPs or milliseconds of a control that a reader must know of


def _broke(c: Mapping[str, Any]) -> list[str]:
    """Runs that ended in what is no number, of either side."""
    sides = ((side, c[side]["broke"], len(c[side]["values"])) for side in ("arm", "control"))
    return [f"{broke} of {runs} runs of the {side} broke down" for side, broke, runs in sides if broke]


def _dearer(c: Mapping[str, Any]) -> list[str]:
    """What an arm that helps costs."""
    pairs = (("FLOPs", "flops"), ("milliseconds", "step_ms")) if c["verdict"] == "helps" else ()
    ratios = [(word, c["arm"].get(key, 0) / (c["control"].get(key) or 1)) for word, key in pairs]
    return [f"{ratio:.1f} times the {word}" for word, ratio in ratios if ratio >= _DEAR]


_CLAIMS = ("", "asked", "published", "arm", "control", "measured", "95 %", "verdict")
_PUBLISHED = (
    "Papers' claims beside what came out here, at the sizes of this page, which are smaller than theirs: a verdict is "
    "of these runs, not of the paper."
)


def published(results: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Mapping[str, Any], tuple[str, ...]]]:
    """Experiments of which something is published, their first comparisons, and the first cells of a row of these."""
    asked = [(e, e["compared"][0]) for e in results["experiments"] if e.get("said") and not e["said"].startswith("no ")]
    return [(e, c, (e["question"], e["said"], _measured(c, "arm"), _measured(c, "control"))) for e, c in asked]


def _measured(c: Mapping[str, Any], side: str) -> str:
    """A mean with its unit."""
    return f"{_mean(c, side)} {_UNIT[c['metric']]}" if c[side]["values"] else "–"


def _sizes(results: Mapping[str, Any]) -> str:
    found = [run["parameters"] for run in results["runs"]]
    return f"models of {min(found):,} to {max(found):,} parameters" if found else "models"


def _uncorrected(results: Mapping[str, Any]) -> list[str]:
    """Where Holm's correction can reject nothing, whatever the runs say."""
    many = sum(e["compared"][0].get("holm") is not None for e in results["experiments"])
    least = 2.0 ** (1 - results["seeds"])
    if many * least <= 0.05:
        return []
    return [
        f"With {results['seeds']} seeds p is at least {least:.3f}, so that over {many} experiments Holm's correction "
        "can reject nothing: verdicts are those of single intervals, and of as many some are chance."
    ]


def _little(c: Mapping[str, Any]) -> bool:
    """Whether neither side has learned the task, so that a difference says little."""
    sides = [list(c[side]["values"].values()) for side in ("arm", "control")]
    return c["metric"] == "accuracy" and all(v and sum(v) / len(v) < _LITTLE for v in sides)


def _rows(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|" + " --- |" * len(head), *(f"| {' | '.join(row)} |" for row in rows), ""]


# ---- the page ------------------------------------------------------------------------------------------------------

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
        f"<dt>{e(name)}</dt>{''.join(f'<dd>{e(text)}</dd>' for text in texts)}" for name, texts in _how(results)
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
    out += [f"<p>{e(_method(results))}</p><details><summary>how it was made</summary><dl>{how}</dl></details>"]
    head = ("calibration", "what must come out", "task", "arm", "control", "effect", "95 %", "as it must be")
    out.append(_table(head, [
        tuple(map(e, (c["id"], c["question"], c["task"], _mean(c, "arm"), _mean(c, "control"), *_effect(c),
                      _outcome(c))))
        for c in results["calibrations"]
    ]))  # fmt: skip
    if words := summary(results):
        out.append("<h2>In plain words</h2><ul>" + "".join(f"<li>{e(line)}</li>" for line in words) + "</ul>")
    if rows := published(results):
        table = _table(_CLAIMS, [(_jump(x), *map(e, (*texts, *_effect(c))), _badge(c)) for x, c, texts in rows])
        out.append(f"<h2>What is published, and what was measured</h2><p>{e(_PUBLISHED)}</p>{table}")
    columns = ("id", "task", "arm", "control", "effect", "95 %", "p, Holm", "verdict", "FLOPs", "state", "ms")
    out.append("<h2>Comparisons</h2>" + _table(columns, [
        (_jump(x), e(c["task"]), e(_mean(c, "arm")), e(_mean(c, "control")),
         *map(e, _effect(c)), e(_p(c)), _badge(c), *_costs(c))
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
    verdict = _verdict(c)
    return f'<span class="v {verdict}">{verdict}</span>' if verdict != "–" else "–"


def _section(x: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """An experiment: its pair of tuples, its intervals, its costs."""
    e = html.escape
    cells = ["<h3>arm</h3><h3>control</h3>"]
    for field, texts in _fields(x):
        moved = [pair for pair in x["moved"] if re.split(r"[.\[]", pair[0])[0] == field]
        kind = "same" if texts[0] == texts[1] else "moved"
        for text, parts in zip(texts, ([m[2] for m in moved], [m[1] for m in moved]), strict=True):
            cells.append(f'<div class="{kind}"><b>{field}</b><code>{_marked(text, parts)}</code></div>')
    found = []
    for c in x["compared"]:
        effect, interval = _effect(c)
        line = (
            f"<b>{e(c['task'])}</b>: {e(effect)} {e(_UNIT[c['metric']])} {e(interval and f'({interval})')} {_badge(c)}"
        )
        unit = _UNIT[c["metric"]]
        by = "".join(f"<br>{unit} by {kind}, arm / control: {e(_listed(values))}" for kind, values in _by(c))
        found.append(
            f'<p>{line}</p>{_bar(c, x["margin"])}<p class="cost">{e(_said(c, results))} {e(_counted(c))}{by}</p>'
        )
    return (
        f'<h2 id="{e(x["id"])}">{e(x["id"])}: {e(x["question"])}</h2>'
        f"<p>From <code>{e(x['source'])}</code>, onto the axis {e(x['axis'])}; {e('; '.join(_beside(x)))}.</p>"
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
