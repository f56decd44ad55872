"""Formulas as SVG: what arithmatex leaves in a page between \\( \\) or \\[ \\] is drawn while the site is built."""

from __future__ import annotations

import functools
import html
import re
from typing import Any

SIZE, EM = 17.5, 16.0  # of letters in a text of so many pixels; drawn in em, so that small text has small formulas
_MARKED = re.compile(r'<(span|div) class="arithmatex">(?:\\\((.*?)\\\)|\\\[(.*?)\\\])</\1>', flags=re.S)


@functools.cache
def drawn(tex: str, inline: bool) -> str:
    """A formula as one SVG that takes the colour of the text around it, and says its source to who cannot see it."""
    import ziamath

    ziamath.config.svg2 = False  # glyphs as paths: no names that two formulas of a page could share
    # a minus with nothing on its left is no operator of two sides
    formula = ziamath.Latex(re.sub(r"(= ?|\()-", r"\1{-}", tex), size=SIZE, color="currentColor", inline=inline)
    height = f"vertical-align:{formula.getyofst() / EM:.3f}em" if inline else ""
    label = html.escape(tex, quote=True)
    svg = re.sub(r' (width|height)="([\d.]+)"', lambda m: f' {m[1]}="{float(m[2]) / EM:.3f}em"', formula.svg(), count=2)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" style="{height}" ', 1)


def on_page_content(page_html: str, **_: Any) -> str:
    """mkdocs calls this with every page's content."""

    def replaced(found: re.Match[str]) -> str:
        tag, inline, block = found.groups()
        tex = html.unescape(inline if inline is not None else block).strip()
        kind = "formula" if tag == "div" else "formula-inline"
        return f'<{tag} class="{kind}">{drawn(tex, tag == "span")}</{tag}>'

    return _MARKED.sub(replaced, page_html)
