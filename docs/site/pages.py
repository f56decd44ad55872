"""What the site renders from the package: an index and a page for every instance of the catalogue.

Nothing here is written down twice: the recurrence, the tuple, the source and what runs come from the tuple and the
class, measured figures from the tables of the committed pages.
"""

from __future__ import annotations

import ast
import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from axes import answers, catalogue
from axes.catalogue import Entry
from axes.symbols import equations

DOCS = Path(__file__).resolve().parents[1]
ROOMS = {"data": "optim", "sequence": "sequence", "depth": "depth"}
TITLES = {"data": "Optimizers", "sequence": "Sequence layers", "depth": "Depth mixers"}
LEGEND = {
    "data": "Along training steps $\\ell_t$ is the loss, $u_t$ its negative gradient.",
    "sequence": "Along tokens $k_t$, $v_t$ and $q_t$ are key, value and query of a head, $o_t$ what it reads.",
    "depth": "Along layers $S$ is the residual streams, transposed: $v_t$ is what a sublayer says, $k_t$ into which "
    "streams, $q_t$ how the next one reads them.",
}
MEASURED = ("kernels.md", "optimizers.md", "depth_costs.md")


def rendered() -> dict[str, str]:
    """Every page by its place in the site."""
    found = {"instances/index.md": index()}
    tables = [table for name in MEASURED for table in tables_of(name)]
    for entry in catalogue.entries():
        found[place(entry)] = page(entry, tables)
    return found


def place(entry: Entry) -> str:
    return f"instances/{ROOMS[entry.axis]}/{entry.name}.md"


# ---- the index -------------------------------------------------------------------------------------------------------


def index() -> str:
    lines = [
        "# Instances",
        "",
        "Every system that comes with the package, by axis. Each page is rendered from the system's tuple: its",
        "recurrence in symbols, what runs it on a CPU and on a GPU and why, its source, and what differs from it.",
    ]
    for axis, title in TITLES.items():
        lines += ["", f"## {title}", "", "| name | cost | h | monoid | memory |", "| --- | --- | --- | --- | --- |"]
        for e in catalogue.entries(axis):  # type: ignore[arg-type]
            cost, h, monoid, _, memory = e.update.parts()
            inner = getattr(cost, "cost", cost)
            names = [inner, h, monoid, memory]
            if h.is_identity:
                names[1] = next((f.parts().h for f in e.update.filters() if not f.parts().h.is_identity), h)
            cells = (f"`{type(part).__name__}`" for part in names)
            lines.append(f"| [{e.name}]({ROOMS[axis]}/{e.name}.md) | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# ---- one instance ----------------------------------------------------------------------------------------------------


def page(e: Entry, tables: list[Table]) -> str:
    dotted = f"axes.{ROOMS[e.axis]}.{e.cls.__name__}"
    summary = " ".join((e.cls.__doc__ or "").strip().split("\n\n")[0].split())
    lines = [f"# {e.name}", "", as_code(summary), "", f"Class [`{dotted}`][{dotted}].", ""]
    lines += ["## Recurrence", "", '<div class="recurrence" markdown>', ""]
    for line in equations(e.update):
        lines += ["$$", line, "$$", ""]
    lines += ["</div>", "", LEGEND[e.axis], "", "Rendered from the tuple by `axes.symbols.equations`:", ""]
    tuple_ = ["```python", *pretty(repr(e.update)).splitlines(), "```"]
    if len(tuple_) > 24:
        tuple_ = ['??? note "The tuple"', "", *(f"    {x}" for x in tuple_)]
    lines += [*tuple_, ""]
    demands = ", ".join(f"`{p.name}` ({p.shape}, {p.domain})" for p in e.update.demands())
    lines += [f"It asks its axis for {demands or 'nothing by name'}.", ""]
    lines += ["## Source", "", f"{e.paper}: {as_code(e.equation)}", ""]
    lines += [f"**What differs.** {as_code(e.differs)}.", ""]
    if e.operator:
        lines += [f"**Named operator.** {e.operator}", ""]
    quoted = ["```bibtex", *e.bibtex.rstrip().splitlines(), "```"]
    lines += ['??? quote "BibTeX"', "", *(f"    {x}" for x in quoted), ""]
    lines += measured(e, tables)
    lines += ["## What runs", ""]
    for where, device in (("On a CPU", "cpu"), ("On a Hopper GPU", "cuda:sm_90")):
        lines += [f"{where} (`axes explain {e.name} --device {device}`):", ""]
        lines += ["```text", answers.explain(e.name, device), "```", ""]
    return "\n".join(lines)


def as_code(words: str) -> str:
    """Text whose formulas must not be read as markup."""
    return re.sub(r"([*_])", r"\\\1", words.rstrip(".")).replace("<", "&lt;")


def pretty(source: str, width: int = 76) -> str:
    """A declaration over several lines, the arguments of what is too long on lines of their own."""

    def shown(node: ast.expr, indent: int) -> str:
        flat = ast.unparse(node)
        if len(flat) + indent <= width or not isinstance(node, ast.Call | ast.Tuple):
            return flat
        inner = " " * (indent + 4)
        if isinstance(node, ast.Tuple):
            return "(\n" + "".join(f"{inner}{shown(x, indent + 4)},\n" for x in node.elts) + " " * indent + ")"
        named = [(f"{k.arg}=", k.value) for k in node.keywords]
        items = [("", x) for x in node.args] + named
        body = "".join(f"{inner}{name}{shown(x, indent + 4)},\n" for name, x in items)
        return f"{ast.unparse(node.func)}(\n{body}{' ' * indent})"

    return shown(ast.parse(source, mode="eval").body, 0)


# ---- measured figures ------------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """A table of a committed page: under which heading, the paragraph that says what it shows, its head, its rows."""

    page: str
    heading: str
    says: str
    head: list[str]
    rows: list[list[str]]


def tables_of(name: str) -> Iterator[Table]:
    """Every table with figures of a page of docs/."""
    heading, paragraph, lines = "", "", (DOCS / name).read_text(encoding="utf-8").splitlines()
    i = 0
    while i < len(lines):
        if lines[i].startswith("#"):
            heading = lines[i].lstrip("# ")
            paragraph = ""
        elif lines[i] and not lines[i].startswith(("|", "<")):
            fresh = not lines[i - 1] or lines[i - 1].startswith("<")
            paragraph = lines[i] if fresh else f"{paragraph} {lines[i]}"
        if lines[i].startswith("|"):
            block = []
            while i < len(lines) and lines[i].startswith("|"):
                block.append([cell.strip() for cell in lines[i].strip("|").split("|")])
                i += 1
            yield Table(name, heading, re.sub(r"\[(.*?)\]\(.*?\)", r"\1", paragraph), block[0], filled(block[2:]))
        i += 1


def filled(rows: list[list[str]]) -> list[list[str]]:
    """Rows whose first cells are left empty for "the same as above"."""
    above: list[str] = []
    out = []
    for row in rows:
        empty = next((i for i, cell in enumerate(row) if cell), 0)
        row = [*above[:empty], *row[empty:]] if empty < 3 else row
        above = row
        out.append(row)
    return out


def measured(e: Entry, tables: list[Table]) -> list[str]:
    """A row of its own, then the rows that name an instance, with the pages that hold them."""
    wanted = {e.name, e.cls.__name__}
    lines: list[str] = []
    for table in tables:
        column = next((i for i, head in enumerate(table.head[:2]) if head in ("rule", "layer", "mixer")), 0)
        if table.head[0].startswith("read and write"):
            column = 0
        rows = [r for r in table.rows if re.split(r"[ ,(]", r[column])[0].strip("`") in wanted]
        if not rows:
            continue
        lines += [f"{table.says} ([{table.heading}](../../{table.page}#{anchor(table.heading)}))", ""]
        lines += ["| " + " | ".join(cells) + " |" for cells in (table.head, ["---"] * len(table.head), *rows)] + [""]
    lines = [*beside_others(e), *lines]
    return ["## Measured", "", *lines] if lines else []


HEADS = {"forward": "forward, ms", "both": "with backward, ms", "state": "numbers of state", "step": "a step, ms"}
SAYS = {
    "sequence": "256 tokens of width 128 in 4 heads",
    "depth": "The read and the write of a sublayer, 256 tokens of width 128",
    "data": "A step of 16 matrices of 128 x 128",
}


def beside_others(e: Entry) -> list[str]:
    """One small size on a CPU, and where that is among the instances of the axis."""
    rows = json.loads((DOCS / "instances.json").read_text(encoding="utf-8"))["rows"]
    if e.name not in rows:
        return []
    others = [rows[x.name] for x in catalogue.entries(e.axis) if x.name in rows]  # type: ignore[arg-type]
    own = rows[e.name]
    lines = [f"{SAYS[e.axis]}, one CPU thread, float32 (`python -m axes.bench.instances docs/instances.json`):", ""]
    lines += ["| | this | least | median | most |", "| --- | ---: | ---: | ---: | ---: |"]
    for key, x in own.items():
        every = [row[key] for row in others if key in row]
        cells = (x, min(every), statistics.median(every), max(every))
        lines.append(f"| {HEADS[key]} | {' | '.join(f'{n:,.0f}' if key == 'state' else f'{n:,.2f}' for n in cells)} |")
    return [*lines, ""]


def anchor(heading: str) -> str:
    """As GitHub makes it, and the site (mkdocs.yml): what falls out between two spaces leaves both."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


# ---- the door for mkdocs ---------------------------------------------------------------------------------------------


def within(markdown: str, folder: Path) -> str:
    """A page whose links to other files of the checkout are words: where the page is read with the code they are links.

    folder: where the page stands. What does not exist stays a link, so that the build complains.
    """

    def judged(link: re.Match[str]) -> str:
        words, target = link.groups()
        found = (folder / target.partition("#")[0]).resolve()
        return link[0] if DOCS in (found, *found.parents) or not found.exists() else words

    return re.sub(r"(?<!!)\[([^\]\n]+)\]\(((?:\.\./)+[^)\s]+)\)", judged, markdown)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs calls this with every page's source."""
    return within(markdown, (DOCS / page.file.src_uri).parent)


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """mkdocs calls this with the files that it found."""
    from mkdocs.structure.files import File

    for where, content in rendered().items():
        files.append(File.generated(config, where, content=content))
    return files
