"""The reports: one page without anything external, docs/claims.md as the register is, and how the page renders."""

from __future__ import annotations

import html
import http.server
import json
import math
import re
import shutil
import subprocess
import threading
from html.parser import HTMLParser
from pathlib import Path

import pytest

from axes.claims import report
from axes.claims.base import Claim, Finding, Result, Verdict, breaks, holds, within
from axes.claims.figures.figure import Figure
from axes.claims.register import find, groups
from axes.claims.report import counts_table, markdown, page

ALL = find()
DOCS = Path(__file__).parents[2] / "docs" / "claims.md"
NASTY = "<script>alert(1)</script> & \"quoted\" 'x' |S - S'|"


def found(claim: Claim) -> tuple[Finding, ...]:
    """Findings of the kind a verdict needs, with numbers of every length."""
    kinds = {
        Verdict.EXACT: (holds("both sides, over every token and head of the layer", 2.2e-16),),
        Verdict.CONDITIONAL: (holds("with it", 0.0), breaks("without it", math.inf, 1e-3)),
        Verdict.FALSE: (breaks("as printed", 1234567.0, 0.5), holds("corrected", 1e-13)),
        Verdict.UNTESTABLE: (),
    }
    return kinds.get(claim.verdict, (within("exponent", -0.5012345, -0.55, -0.45),))


def results() -> list[Result]:
    made = [Result(c, found(c)) for c in ALL]
    made[0] = Result(ALL[0], (holds(NASTY, 1.0),))
    made[1] = Result(ALL[1], (), 0.0, 'Traceback:\n  File "a<b>.py"\nRuntimeError: ' + "x" * 300)
    return made


@pytest.fixture(scope="module")
def text() -> str:
    return page(results())


class Page(HTMLParser):
    """Every tag closed in order, and what the page refers to."""

    VOID = {"meta", "link", "img", "br", "hr"}

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attributes}))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def values(self, *names: str) -> list[str]:
        return [value for _, attributes in self.tags for name, value in attributes.items() if name in names]


def test_the_page_parses_with_every_tag_closed(text: str) -> None:
    parsed = Page(text)
    ids = parsed.values("id")
    assert len(ids) == len(set(ids))
    assert {tag for tag, _ in parsed.tags} >= {"html", "head", "title", "body", "table", "figure", "details"}


def test_the_page_refers_to_nothing_external(text: str) -> None:
    parsed = Page(text)
    references = parsed.values("src", "href", "srcset", "action", "data", "poster", "cite", "background")
    assert references and all(value.startswith(("data:", "#")) for value in references)
    assert {value[1:] for value in references if value.startswith("#")} <= set(parsed.values("id"))
    outside_data = re.sub(r'"data:[^"]*"', '""', text)
    assert not re.search(r"url\s*\(|@import|https?:|<script|\son\w+=", outside_data, re.IGNORECASE)


def test_the_page_has_a_viewport(text: str) -> None:
    metas = [attributes for tag, attributes in Page(text).tags if tag == "meta"]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in metas
    assert metas[0] == {"charset": "utf-8"}


def test_every_claim_is_on_the_page(text: str) -> None:
    parsed = Page(text)
    rows = [attributes["id"] for tag, attributes in parsed.tags if tag == "tr" and "id" in attributes]
    assert rows == [c.id for c in ALL]
    words = "".join(parsed.text)
    for c in ALL:
        assert c.statement in words and " ".join(c.derivation.split()) in words


def test_findings_and_errors_are_shown_and_harmless(text: str) -> None:
    parsed = Page(text)
    words = "".join(parsed.text)
    assert NASTY in words and 'File "a<b>.py"' in words
    assert f"{len([c for c in ALL if c.check]) - 2} of {len([c for c in ALL if c.check])} testable claims" in words
    assert "A01 does not hold its verdict." in words and "A02 does not hold its verdict." in words
    bad = [tag for tag, attributes in parsed.tags if attributes.get("class") == "bad"]
    assert bad == ["p", "p", "div", "pre"]


def test_the_figures_are_data(text: str) -> None:
    images = [attributes for tag, attributes in Page(text).tags if tag == "img"]
    shown = [f for f in _figures() if any(c.figure == f.name for c in ALL)]
    assert [image["alt"] for image in images] == [f.title for f in shown]
    assert all(image["src"].startswith("data:image/png;base64,iVBOR") for image in images)


def _figures() -> tuple[Figure, ...]:
    from axes.claims.figures import FIGURES

    return tuple(FIGURES)


def test_claims_and_figures_name_each_other() -> None:
    names = [f.name for f in _figures()]
    assert len(names) == len(set(names))
    assert {c.figure for c in ALL} - {""} == set(names)
    assert all(f.title and f.caption for f in _figures())


def test_a_page_of_a_few_claims_has_their_figures_only() -> None:
    chosen = [Result(c, found(c)) for c in find(["A05", "K"])]
    parsed = Page(page(chosen))
    assert not [tag for tag, _ in parsed.tags if tag == "img"]
    assert [value for value in parsed.values("id")] == ["group-A", "A05", "group-K", "K01", "K02", "K03"]


# --- docs/claims.md


def test_the_docs_are_current() -> None:
    assert DOCS.read_text(encoding="utf-8") == markdown(ALL), "run: axes verify --docs docs/claims.md"


def test_the_docs_hold_every_claim_and_the_counts() -> None:
    text = markdown(ALL)
    assert re.findall(r"^### (\w+) · (.+)$", text, re.MULTILINE) == [(c.id, c.verdict.value) for c in ALL]
    assert re.findall(r"^## (\w)\. ", text, re.MULTILINE) == list(groups())
    assert counts_table(ALL)[-1] == ["all", "86", "48", "5", "15", "60", "14", "228"]
    assert "| " + " | ".join(counts_table(ALL)[-1]) + " |" in text
    assert text.endswith("\n") and not text.endswith("\n\n")


@pytest.mark.parametrize(
    "formula, written",
    [
        ("S_t = A_t * S_{t-1} + v k^T", "S_t = A_t * S_{t-1} + v k^T"),
        ("a*b*c", r"a\*b\*c"),
        ("*x* and _y_ and |D|_1", r"\*x* and \_y_ and |D|\_1"),
        ("<v, S k> <b>", r"\<v, S k> \<b>"),
        ("1 <= 2 < 3", "1 <= 2 < 3"),
        ("k~_1, `x` \\ y", r"k\~\_1, \`x\` \\ y"),
    ],
)
def test_formulas_are_literal_in_markdown(formula: str, written: str) -> None:
    assert report._literally(formula) == written


# --- how it renders

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
WIDTHS = (375, 1280)

# Frames are viewports of any width, where a window has a least one. Everything is unfolded for a second look.
HARNESS = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><pre id="measured"></pre>%s<script>
addEventListener("load", () => {
  const look = frame => {
    const page = frame.contentDocument, window = frame.contentWindow, width = window.innerWidth;
    const wide = [...page.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right > width + 1);
    return { width, scroll: page.documentElement.scrollWidth, wide: wide.slice(0, 5).map(e => e.outerHTML.slice(0, 99)),
             images: [...page.images].filter(i => !(i.complete && i.naturalWidth)).length,
             requests: window.performance.getEntriesByType("resource").map(r => r.name) };
  };
  const seen = [];
  for (const frame of document.querySelectorAll("iframe")) {
    seen.push(look(frame));
    for (const d of frame.contentDocument.querySelectorAll("details")) d.open = true;
    seen.push(look(frame));
  }
  document.getElementById("measured").textContent = JSON.stringify(seen);
});
</script>"""


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium: none of chromium, chromium-browser, google-chrome is installed")
def test_the_page_renders_at_both_widths(text: str, tmp_path: Path) -> None:
    frames = "".join(f'<iframe src="/page" style="border:0;width:{w}px;height:800px"></iframe>' for w in WIDTHS)
    pages = {"/harness": HARNESS % frames, "/page": text}
    requests: list[str] = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_response(200 if self.path in pages else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(pages.get(self.path, "").encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,900"]
    flags += ["--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom"]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            address = f"http://127.0.0.1:{server.server_port}/harness"
            done = subprocess.run([CHROMIUM, *flags, address], capture_output=True, text=True, timeout=120)
        finally:
            server.shutdown()
    match = re.search(r'<pre id="measured">(.+?)</pre>', done.stdout, re.DOTALL)
    assert match, done.stderr[-2000:]
    seen = json.loads(html.unescape(match[1]))
    assert [look["width"] for look in seen] == [w for w in WIDTHS for _ in ("folded", "unfolded")]
    for look in seen:
        assert look["scroll"] <= look["width"], look
        assert look["images"] == 0 and look["requests"] == [], look
    assert "CONSOLE" not in done.stderr
    assert sorted(requests) == ["/harness", *("/page" for _ in WIDTHS)]
