"""Every instance by name: lookup, citations, and the taxonomy rendered from the tuples themselves.

`python -m axes.catalogue` writes docs/taxonomy.md and the table of the README; a test compares them with the code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final, get_args

from axes import depth, optim, sequence
from axes.core.derived import block_size, feedback, structure
from axes.core.monoids import Monoid
from axes.core.state_update import StateUpdate
from axes.errors import AxesError, UnknownName
from axes.optim.elsewhere import elsewhere
from axes.routes.choice import Implementation, Plan, Target

Axis = Literal["data", "sequence", "depth"]
_FAMILIES: dict[Axis, tuple[Any, ...]] = {"data": optim.ALL, "sequence": sequence.ALL, "depth": depth.ALL}
_BEGIN, _END = "<!-- taxonomy: rendered by `python -m axes.catalogue` -->", "<!-- end of taxonomy -->"


@final
@dataclass(frozen=True)
class Entry:
    """One instance: its axis and name, the class that users construct, its tuple, and where it comes from.

    differs: where paper, official code and this package differ.  operator: why a part is a named operator that the
    laws of h or of costs do not hold for, or "".
    """

    axis: Axis
    name: str
    cls: Any
    update: StateUpdate
    paper: str
    equation: str
    differs: str
    bibtex: str
    operator: str = ""

    def plans(
        self, target: Target | None = None, dtype: Any = None, implementation: Implementation | None = None
    ) -> tuple[Plan, ...]:
        """What runs for it, by default on a CPU in float32."""
        found: tuple[Plan, ...] = self.cls.default_plans(target, dtype, implementation)
        return found


def _entry(axis: Axis, cls: Any) -> Entry:
    return Entry(
        axis,
        cls.name,
        cls,
        cls.update,
        cls.paper,
        cls.equation,
        cls.differs,
        cls.bibtex.strip() + "\n",
        getattr(cls, "named_operator", ""),
    )


_ENTRIES: tuple[Entry, ...] = tuple(_entry(axis, cls) for axis, family in _FAMILIES.items() for cls in family)


def entries(axis: Axis | None = None) -> tuple[Entry, ...]:
    """All instances, or those of one axis, relatives side by side. Raises UnknownName for another axis."""
    if axis is None:
        return _ENTRIES
    if axis not in get_args(Axis):
        raise UnknownName("axis", axis, get_args(Axis))
    return tuple(e for e in _ENTRIES if e.axis == axis)


def get(name: str, axis: Axis | None = None) -> Entry:
    """The instance of a name.

    Raises:
        UnknownName: with the nearest matches, or with what says a rule that is no class of its own.
    """
    found = {e.name: e for e in entries(axis)}
    if name in found:
        return found[name]
    kind = {"data": "optimizer", "sequence": "sequence layer", "depth": "depth mixer"}.get(axis or "", "instance")
    raise UnknownName(kind, name, found, elsewhere(name) if axis in (None, "data") else None)


def cite(obj: object) -> str:
    """The bibtex entry of a name, class, object or catalogue entry."""
    if isinstance(obj, str):
        return get(obj).bibtex
    if isinstance(obj, Entry):
        return obj.bibtex
    cls = obj if isinstance(obj, type) else type(obj)
    for entry in _ENTRIES:
        if entry.cls is cls:
            return entry.bibtex
    raise AxesError(f"cite: {cls.__name__} is not in the catalogue")


# ---- rendering ---------------------------------------------------------------------------------------------------


def taxonomy() -> str:
    """docs/taxonomy.md: one table an axis with derived facts, then every instance with its exact tuple and source."""
    lines = ["# Taxonomy", "", "Rendered from the catalogue by `python -m axes.catalogue`; do not edit by hand.", ""]
    lines += [
        "The columns cost to memory are the tuple. Feedback, transition and route are derived: how the gradient",
        "of a datum depends on the state, the structure of one step's effective transition (with the slots of",
        "the chain of state and buffers), and what `axes.select` says runs on a CPU.",
        "",
    ]
    for axis in get_args(Axis):
        lines += [f"## The {axis} axis", "", *_table(entries(axis)), ""]
    for axis in get_args(Axis):
        lines += [f"## Tuples and sources: {axis}", ""]
        for entry in entries(axis):
            lines += _page(entry)
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: Iterable[Entry]) -> list[str]:
    head = ("name", "cost", "h", "monoid", "step", "memory", "feedback", "transition", "route")
    out = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for e in rows:
        update = e.update
        cost, h, monoid, step, memory = update.parts()
        at = step.at if isinstance(step.at, str) else f"anchor {step.at.every}"
        words = [at] + [
            w
            for w, on in (("agile", not step.lazy), ("read point", step.read is not None), ("debiased", step.debias))
            if on
        ]
        slots = block_size(update)
        site = type(h).__name__ if not h.is_identity else ", ".join(_filter_geometries(update)) or "Euclidean"
        keyed = memory.keyed and e.axis != "data"
        cells = (
            f"`{e.name}`",
            type(cost).__name__ + (f"({type(cost.cost).__name__})" if hasattr(cost, "cost") else ""),
            site,
            _maps(monoid),
            ", ".join(words) + (f"; {slots - 1} filter{'s' * (slots > 2)}" if slots > 1 else ""),
            type(memory).__name__,
            feedback(update) if keyed else "oracle" if "g" in cost.needs else feedback(update),
            f"{structure(update)}" + (f", {slots} slots" if slots > 1 else ""),
            e.plans()[0].choice.route,
        )
        out.append("| " + " | ".join(cells) + " |")
    return out


def _maps(monoid: Monoid) -> str:
    """The monoid, with the link that says which matrices are in it."""
    link = getattr(monoid, "link", None)
    return type(monoid).__name__ + (f"({link!r})" if link is not None and not link.is_identity else "")


def _filter_geometries(update: StateUpdate) -> list[str]:
    names = [type(f.parts().h).__name__ for f in update.filters() if not f.parts().h.is_identity]
    return [f"{n} on the update" for n in names]


def _page(e: Entry) -> list[str]:
    summary = (e.cls.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
    lines = [f"### {e.name}", "", " ".join(summary.split()), "", f"- class: `axes.{_module(e.axis)}.{e.cls.__name__}`"]
    lines += [f"- tuple: `{e.update!r}`", f"- source: {e.paper}, {e.equation}", f"- differs: {e.differs}"]
    if e.operator:
        lines.append(f"- named operator: {e.operator}")
    return [*lines, ""]


def _module(axis: Axis) -> str:
    return {"data": "optim", "sequence": "sequence", "depth": "depth"}[axis]


def readme_block() -> str:
    """The README's table: every name by axis."""
    lines = [_BEGIN, "", "| axis | instances |", "| --- | --- |"]
    for axis in get_args(Axis):
        lines.append(f"| {axis} | {', '.join(f'`{e.name}`' for e in entries(axis))} |")
    return "\n".join([*lines, "", _END])


def with_block(text: str) -> str:
    """The README with its table renewed. Raises AxesError if the markers are gone."""
    if _BEGIN not in text or _END not in text:
        raise AxesError("README.md: the taxonomy markers are missing; put them back around the table")
    before, rest = text.split(_BEGIN, 1)
    return before + readme_block() + rest.split(_END, 1)[1]


def main(root: Path) -> None:
    """Write the rendered pages."""
    (root / "docs" / "taxonomy.md").write_text(taxonomy(), encoding="utf-8")
    readme = root / "README.md"
    readme.write_text(with_block(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
