"""The documentation runs: every snippet, every refusal, every page that is rendered, without the site's tools."""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from axes import answers, catalogue

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PYTHON = re.compile(r"```python\n(.*?)```", flags=re.S)
REFUSAL = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)\n```", flags=re.S)
PARTS = tuple(f"parts/{path.stem}" for path in sorted((DOCS / "parts").glob("*.md")))
NOT_TIMED = ("hebbian",)  # it has no loss to go down, and leaves the numbers
WITH_CODE = ("start", "idea", "layers", "tuple_to_kernel", "own_system", "sharded", *PARTS)
ELSEWHERE = {  # pages whose snippets need something else around them, and what runs them
    "depth": "depth/test_checkpoints.py",
    "fla": "integrations/test_fla.py",
    "optimizer_options": "optim/test_routing.py",
    "optimizers": "optim/test_diagnostics.py",
    "refusals": "axes/test_docs.py",
    "transformers": "integrations/test_transformers.py",
}


def loaded(name: str) -> types.ModuleType:
    """A module of docs/site, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_site_{name}", DOCS / "site" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", WITH_CODE)
def test_snippets_run_in_order(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    snippets = PYTHON.findall((DOCS / f"{name}.md").read_text(encoding="utf-8"))
    assert snippets
    page = types.ModuleType("page")  # what is declared in a page is pickled by its module
    monkeypatch.setitem(sys.modules, "page", page)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(compile("\n".join(snippets), f"{name}.md", "exec"), page.__dict__)


def test_every_page_with_snippets_is_run() -> None:
    pages = {path.relative_to(DOCS).with_suffix("").as_posix(): path for path in DOCS.rglob("*.md")}
    with_code = {name for name, path in pages.items() if PYTHON.search(path.read_text(encoding="utf-8"))}
    assert with_code == {*WITH_CODE, *ELSEWHERE}
    for name, test in ELSEWHERE.items():
        assert f"{name}.md" in (ROOT / "tests" / test).read_text(encoding="utf-8"), name


REFUSALS = REFUSAL.findall((DOCS / "refusals.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("code", "message"), REFUSALS, ids=range(len(REFUSALS)))
def test_refusals_say_what_the_page_says(code: str, message: str) -> None:
    with pytest.raises(Exception) as caught:
        exec(compile(code, "refusals.md", "exec"), {"__name__": "page"})
    assert f"{type(caught.value).__name__}: {caught.value}" == message


def test_every_snippet_of_refusals_has_its_message() -> None:
    text = (DOCS / "refusals.md").read_text(encoding="utf-8")
    assert len(REFUSALS) == len(PYTHON.findall(text)) > 20


def test_drawings_are_current() -> None:
    """Numbers of a drawing may be off by the last digit, where another machine rounds another way."""
    drawings = loaded("drawings").drawings()
    assert set(drawings) == {path.name for path in (DOCS / "figures").glob("*.svg")}
    number = re.compile(r"-?\d+\.\d")
    for name, drawing in drawings.items():
        found = (DOCS / "figures" / name).read_text(encoding="utf-8")
        assert number.sub("#", found) == number.sub("#", drawing), f"{name}: run `python docs/site/drawings.py`"
        pairs = zip(number.findall(found), number.findall(drawing), strict=True)
        assert all(abs(float(a) - float(b)) < 0.15 for a, b in pairs), name


def test_every_instance_has_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = loaded("pages")
    monkeypatch.setattr(answers, "explain", lambda name, device: f"{name} on {device}")  # has tests of its own
    found = pages.rendered()
    anchors = {
        name: {pages.anchor(head) for head in re.findall(r"^#+ (.*)$", (DOCS / name).read_text(), flags=re.M)}
        for name in pages.MEASURED
    }
    for entry in catalogue.entries():
        page = found[pages.place(entry)]
        assert page.startswith(f"# {entry.name}\n") and "$$\n" in page and entry.paper in page
        assert repr(entry.update) == repr(eval(pages.pretty(repr(entry.update)), dict(_names())))
        for name, anchor in re.findall(r"\(../../(\w+\.md)#(.*?)\)", page):
            assert anchor in anchors[name], (entry.name, name, anchor)
        assert ("## Measured" in page) != (entry.name in NOT_TIMED), entry.name
    measured = found["instances/sequence/gated-delta-net.md"]
    assert re.search(r"\| GatedDeltaNet \| [\d.]+ / [\d.]+", measured) and "axes bench layers" in measured


def test_anchors_of_links_are_headings_of_their_pages() -> None:
    """Where the pages are read with the code as well: the site's anchors are made in the same way (mkdocs.yml)."""
    pages = loaded("pages")
    texts = {path: re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S) for path in DOCS.glob("*.md")}
    heads = {path: {pages.anchor(head) for head in re.findall(r"^#+ (.*)$", text, flags=re.M)}
             for path, text in texts.items()}  # fmt: skip
    links = [(path, *link) for path, text in texts.items() for link in re.findall(r"\]\(([\w/]*\.md)?#([^)]+)\)", text)]
    assert links
    for path, target, anchor in links:
        page = path.parent / target if target else path
        assert page not in heads or anchor in heads[page], (path.name, target, anchor)


def test_links_out_of_the_pages_become_words() -> None:
    text = "[a](../README.md#x), [b](start.md), [c](../missing.py), ![d](../README.md), [e](../docs/idea.md)"
    found = loaded("pages").within(text, DOCS)
    assert found == "a, [b](start.md), [c](../missing.py), ![d](../README.md), [e](../docs/idea.md)"


def _names() -> dict[str, object]:
    from axes.testing.checks import NAMES

    return dict(NAMES)


def test_navigation_names_pages_that_exist() -> None:
    for folder in (DOCS, DOCS / "api"):
        text = (folder / ".nav.yml").read_text(encoding="utf-8")
        for name in re.findall(r"[\w/]+\.md", text):
            assert (folder / name).exists() or name == "instances/index.md", name


def test_nothing_is_fetched_by_a_reader() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "http" not in settings and "font: false" in settings and "extra_javascript" not in settings
