"""Examples in docstrings, as the reference shows them: what begins with >>> is code, wherever it stands."""

from __future__ import annotations

import re
from typing import Any

import griffe

# a prompt, and what follows up to an empty line
_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", flags=re.M)


class Examples(griffe.Extension):
    """Puts doctests between fences before they are read as Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """griffe calls this with everything that it found."""
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            obj.docstring.value = _EXAMPLE.sub(lambda m: f"```pycon\n{m[0]}\n```", obj.docstring.value)
