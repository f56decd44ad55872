"""What tables and pages say of results: effects, verdicts, costs, and sentences that these results bear out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from axes.transfer import findings
from axes.transfer.trials import loss_by

UNIT = {"accuracy": "accuracy", "bits per byte": "bits a byte", "explained": "share explained"}
_MEANS = {
    "helps": "The whole interval is above the margin: it helps.",
    "hurts": "The whole interval is below the margin: it hurts.",
    "equivalent": "The whole interval is within the margin: it makes no difference that matters.",
    "undecided": "The interval and the margin overlap: these runs do not say.",
}


def compared(results: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every comparison, those that calibrate first."""
    yield from results["calibrations"]
    for e in results["experiments"]:
        yield from e["compared"]


def notes(results: Mapping[str, Any]) -> list[str]:
    """What went otherwise than it was asked for, whose runs, and in how many."""
    whose: dict[tuple[str, str], str] = {}
    for c in (*results["calibrations"], *({**c, "id": e["id"]} for e in results["experiments"] for c in e["compared"])):
        for side in ("arm", "control"):
            whose.setdefault((c["task"], c[side]["system"]), f"the {side} of {c['id']} on {c['task']}")
    found = Counter((run["task"], run["system"], run.get("note", "")) for run in results["runs"])
    return [
        f"{whose.get((task, system), f'{task}-{system}')}: {note} ({n} run{'s' * (n > 1)})"
        for (task, system, note), n in found.items() if note
    ]  # fmt: skip


def left(count: int) -> str:
    """What a comparison waits for."""
    return f"{count} run{'s' * (count != 1)} to go"


def effect(c: Mapping[str, Any]) -> tuple[str, str]:
    if "effect" not in c:
        return left(c["missing"]), ""
    return f"{c['effect']:+.3f}", f"{c['low']:+.3f} … {c['high']:+.3f}"


def mean(c: Mapping[str, Any], side: str) -> str:
    values = list(c[side]["values"].values())
    if not values:
        return "–"
    broke = c[side]["broke"]
    return f"{sum(values) / len(values):.3f}" + (f" ({broke} broke down)" if broke else "")


def holm(c: Mapping[str, Any]) -> str:
    return f"{c['holm']:.2f}" if c.get("holm") is not None else "–"


def verdict(c: Mapping[str, Any]) -> str:
    return c.get("verdict") or "–"


def costs(c: Mapping[str, Any]) -> tuple[str, str, str]:
    """FLOPs, bytes of state and milliseconds of the arm over those of the control."""
    return tuple(_ratio(c["arm"].get(k), c["control"].get(k)) for k in ("flops", "state", "step_ms"))  # type: ignore[return-value]


def _ratio(a: float | None, c: float | None) -> str:
    return "–" if not a or not c else f"{a / c:.2f}"


def counted(c: Mapping[str, Any]) -> str:
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


def by(c: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, float, float]]]]:
    """The metric of arm and control, and the loss of answers, by length, by pairs, by position: what, and values."""
    arm, control = (c[side].get("by", {}) for side in ("arm", "control"))
    found = []
    for kind in ("length", "pairs", "position"):
        for name, text in ((kind, f"{UNIT[c['metric']]} by {kind}"), (loss_by(kind), f"loss by {kind}, in nats")):
            shared = [(n, v, control[name][n]) for n, v in arm.get(name, {}).items() if n in control.get(name, {})]
            found += [(text, shared)] if shared else []
    return found


def how(results: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
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


def method(results: Mapping[str, Any]) -> str:
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


def said(c: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """In plain words."""
    if "effect" not in c:
        return f"not finished, {left(c['missing'])}."
    broke = [f"{note}{_why(c, results)}." for note in _broke(c)]
    if c["verdict"] is None:
        return " ".join(["no verdict.", *broke])
    return " ".join([_MEANS[c["verdict"]], *(["Neither side learned the task."] if _little(c) else []), *broke])


def _why(c: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """What a run that broke down said of it, if one of them did."""
    mine = {(c["task"], c[side]["system"]) for side in ("arm", "control")}
    notes = (r["note"] for r in results["runs"] if (r["task"], r["system"]) in mine and r["broke"] and r.get("note"))
    note = next(notes, "")
    return f" ({note})" if note else ""


def beside(e: Mapping[str, Any]) -> list[str]:
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


def fields(e: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    for field, arm in e["arm"].items():
        yield field, (arm, e["control"][field])


CALIBRATION = ("", "what must come out", "task", "arm", "control", "effect", "95 %", "as it must be")


def calibration(c: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of the table of calibrations."""
    return (c["id"], c["question"], c["task"], mean(c, "arm"), mean(c, "control"), *effect(c), outcome(c))


def outcome(c: Mapping[str, Any]) -> str:
    """Whether a calibration came out as it must; that of equals says how."""
    if "effect" not in c:
        return "not known yet"
    return "NO" if not c["holds"] else "yes" if c["verdict"] == "helps" else f"yes, {c['verdict']}"


_LITTLE = 0.15  # accuracy below which both sides know next to nothing


def summary(results: Mapping[str, Any]) -> list[str]:
    """What all comparisons say, one sentence a verdict, what hurts or does nothing as well as what helps."""
    found: dict[str, list[str]] = {}
    for e in results["experiments"]:
        for c in e["compared"]:
            kind, noted = "missing", left(c.get("missing", 0))
            if "effect" in c:
                if not c["verdict"]:
                    continue
                kind = "little" if c["verdict"] in ("equivalent", "undecided") and _little(c) else c["verdict"]
                noted = "; ".join((f"{c['effect']:+.3f}", *_broke(c), *_dearer(c)))
            asked = f" ({e['question']})" if kind in ("helps", "hurts") and "said" not in e else ""
            found.setdefault(kind, []).append(f"{e['id']}{asked} on {c['task']} ({noted})")
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


CLAIMS = ("", "asked", "published", "arm", "control", "measured", "95 %", "verdict")
PUBLISHED = (
    "Papers' claims beside what came out here, at the sizes of this page, which are smaller than theirs: a verdict is "
    "of these runs, not of the paper."
)


def published(results: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Mapping[str, Any], tuple[str, ...]]]:
    """Experiments of which something is published, their first comparisons, and the first cells of a row of these."""
    asked = [(e, e["compared"][0]) for e in results["experiments"] if e.get("said") and not e["said"].startswith("no ")]
    return [(e, c, (e["question"], e["said"], _measured(c, "arm"), _measured(c, "control"))) for e, c in asked]


def _measured(c: Mapping[str, Any], side: str) -> str:
    """A mean with its unit."""
    return f"{mean(c, side)} {UNIT[c['metric']]}" if c[side]["values"] else "–"


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


def listed(values: list[tuple[str, float, float]]) -> str:
    return ", ".join(f"{n}: {a:.3f} / {c:.3f}" for n, a, c in values)
