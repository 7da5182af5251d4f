"""The page that shows a run, and the policy by which a browser runs nothing else with it."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("page.html")
INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class Page(NamedTuple):
    """An HTML document, and its Content-Security-Policy."""

    body: bytes
    policy: str


def load() -> Page:
    """Reads the page. Its own script and style are let in by their hashes, and no other is."""
    text = FILE.read_bytes().decode()
    allowed = {kind: _hash(content) for kind, content in INLINE.findall(text)}
    policy = (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; "
        "connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(text.encode(), policy)


def _hash(content: str) -> str:
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"
