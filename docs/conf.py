"""How the documentation is built: python -m sphinx -W -b html docs docs/_build

Needs `pip install -e ".[docs]"` and no network; pages load nothing from anywhere else. The pages
are plain Markdown; what is taken from the code is in them already (docs/generate.py).
"""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

import pccl

sys.path.insert(0, str(Path(__file__).parent))
import generate

project = "pccl"
author = "The pccl authors"
copyright = "the pccl authors"
release = version = pccl.__version__

extensions = ["myst_parser"]
exclude_patterns = ["_build", "_parts"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"pccl {release}"
html_show_sphinx = False
html_copy_source = False


def _navigate(app: Sphinx, page: str, source: list[str]) -> None:
    """The lists of links on the first page are the navigation of all pages."""
    if page == "index":
        sections = re.findall(r"^## (.*)\n\n((?:- \[.*\n)+)", source[0], re.MULTILINE)
        for caption, links in sections:
            pages = "\n".join(re.findall(r"\((.*)\.md\)", links))
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"


def _fill(app: Sphinx, page: str, source: list[str]) -> None:
    """What is taken from docstrings and declarations stands in no file."""
    source[0] = generate.built(source[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _navigate)
    app.connect("source-read", _fill)
