"""How the documentation is built: python -m sphinx -W -b html docs docs/_build

Needs `pip install -e ".[docs]"` and no network; pages load nothing from anywhere else.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent / "tests")]
os.environ["COLUMNS"] = "90"  # of the help texts of commands

import pccl  # noqa: E402

project = "pccl"
author = "The pccl authors"
copyright = "the pccl authors"
release = version = pccl.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "docstrings", "pccl_docs"]
exclude_patterns = ["_build", "_ext"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_mock_imports = ["torch"]  # pccl.diloco can be read without it
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"pccl {release}"
html_show_sphinx = False
html_copy_source = False
