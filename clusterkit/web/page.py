"""The page of `clusterkit web`: markup, style, script and chart library in one document.

So it loads nothing, its Content-Security-Policy can forbid everything else, and a report is the
same page with the server's answers in it.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Mapping
from importlib import resources
from typing import Any

import msgspec

_VENDORED = "vendor/uplot"
"""https://github.com/leeoniya/uPlot; `SOURCE.md` there says which version."""
_OWN = ("page.curves.js", "page.log.js", "page.js")


def _text(*names: str) -> str:
    folder = resources.files("clusterkit.web")
    return "\n".join((folder / name).read_text() for name in names)


@functools.cache
def _parts() -> tuple[str, str, str]:
    """Return markup, style and script."""
    style = _text(f"{_VENDORED}/uPlot.min.css", "page.css")
    library, own = _text(f"{_VENDORED}/uPlot.iife.min.js"), _text(*_OWN)
    return _text("page.html"), style, f'{library}\n(() => {{\n"use strict";\n{own}\n}})();\n'


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@functools.cache
def policy(connect: str = "'self'") -> str:
    """Return the Content-Security-Policy: only our script and style, by their hashes."""
    _, style, script = _parts()
    return (
        f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def render(answers: Mapping[str, Any] | None = None, at: float = 0.0) -> bytes:
    """Return the page, or a report, which asks no server.

    Args:
        answers: for a report, what the server would answer, by path.
        at: when the report was made, as a Unix time.
    """
    markup, style, script = _parts()
    head = data = ""
    if answers is not None:
        policy_text = policy(connect="'none'")
        head = f'<meta http-equiv="Content-Security-Policy" content="{policy_text}">\n'
        # Without "<" the data cannot end the script element that holds it.
        text = msgspec.json.encode({"at": at, "answers": answers}).decode().replace("<", "\\u003c")
        data = f'<script type="application/json" id="data">{text}</script>\n'
    before, _, rest = markup.partition("/* style */")
    between, _, end = rest.partition("/* script */")
    between = between.replace("<!-- data -->\n", data)
    before = before.replace('<meta charset="utf-8">\n', f'<meta charset="utf-8">\n{head}')
    return "".join([before, style, between, script, end]).encode()
