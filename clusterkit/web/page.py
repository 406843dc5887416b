"""The page of `clusterkit web`, whole: markup, style, program and chart library in one document.

So there is nothing to fetch from anywhere, the policy below can forbid everything else, and a
report is the same page with the answers in it.
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
NOBODY, US = "'none'", "'self'"
"""Whom the page may ask."""


def _text(*names: str) -> str:
    folder = resources.files("clusterkit.web")
    return "\n".join((folder / name).read_text() for name in names)


@functools.cache
def _parts() -> tuple[str, str, str]:
    """Markup, style, program."""
    style = _text(f"{_VENDORED}/uPlot.min.css", "page.css")
    library, own = _text(f"{_VENDORED}/uPlot.iife.min.js"), _text(*_OWN)
    return _text("page.html"), style, f'{library}\n(() => {{\n"use strict";\n{own}\n}})();\n'


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@functools.cache
def policy(connect: str = US) -> str:
    """Content-Security-Policy: our program and style, to the letter, and no other."""
    _, style, program = _parts()
    return (
        f"default-src 'none'; script-src {_source(program)}; style-src {_source(style)}; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def whole(answers: Mapping[str, Any] | None = None, at: float = 0.0) -> bytes:
    """The page; with ``answers``, path to what a server would say, one that asks nobody."""
    markup, style, program = _parts()
    head = data = ""
    if answers is not None:
        head = f'<meta http-equiv="Content-Security-Policy" content="{policy(NOBODY)}">\n'
        # Nothing in it can end the element that it stands in.
        inside = (
            msgspec.json.encode({"at": at, "answers": answers}).decode().replace("<", "\\u003c")
        )
        data = f'<script type="application/json" id="data">{inside}</script>\n'
    before, _, rest = markup.partition("/* style */")
    between, _, end = rest.partition("/* script */")
    between = between.replace("<!-- data -->\n", data)
    before = before.replace('<meta charset="utf-8">\n', f'<meta charset="utf-8">\n{head}')
    return "".join([before, style, between, program, end]).encode()
