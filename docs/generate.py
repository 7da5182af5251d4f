"""Writes the parts of the documentation that are taken from the code into its pages.

    python docs/generate.py             # after a change of the code that a page quotes or lists
    python docs/generate.py --check     # only says which pages are not up to date

The pages are plain Markdown, to be read on a forge, in an editor or as built by Sphinx alike.
What stands between these two lines is made by the maker of that name; a test compares.

    <!-- made: MAKER ARGUMENTS -->
    <!-- end -->

A line `<!-- built: MAKER ARGUMENTS -->` is filled only when Sphinx builds the page.

listing FILE [from TEXT] [until TEXT] | listing FILE function NAME      a part of a file
sequence (one `a -> b: Message ...` on each of the next lines)          who says what to whom
class NAME ... | classes FILE | module FILE                             signatures and docstrings
commands                                the sub-commands of `pccl` and their options
strategies                              how all-reduces of some sizes travel
output COMMAND ...                      what `pccl COMMAND ...` prints
plans STEP PEERS:UPLINK ...             what it recommends, for models of three sizes
faults                                  the kinds of faults of `pccl chaos`
messages peer|master | values | limits  of the control protocol
combinations                            which settings of DiLoCo go together
integrations                            the runs of tests/integration/test_integrations.py
conversation NAME                       a table of tests/support/simulation/conversation.py
transitions | exclusions                the states of a collective; which calls may meet
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS / "_parts"), str(ROOT / "tests" / "support")]

import api  # noqa: E402
import charts  # noqa: E402
import combinations  # noqa: E402
import commands  # noqa: E402
import integrations  # noqa: E402
import listings  # noqa: E402
import wire  # noqa: E402

PART = re.compile(r"^<!-- made: (.*?)\s*-->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
BUILT = re.compile(r"^<!-- built: (.*?)\s*-->$", re.MULTILINE)
MAKERS = {
    "listing": lambda *words: listings.listing(ROOT, *words),
    "class": lambda *names: api.classes(ROOT, *names),
    "classes": lambda path: api.all_classes(ROOT, path),
    "module": lambda path: api.module(ROOT, path),
    "commands": commands.commands,
    "output": commands.output,
    "plans": commands.plans,
    "faults": commands.faults,
    "strategies": commands.strategies,
    "integrations": lambda: integrations.table(DOCS / "howto" / "integrations.json"),
    "messages": wire.messages,
    "values": wire.values,
    "combinations": combinations.table,
    "limits": wire.limits,
    "conversation": wire.conversation,
    "transitions": wire.transitions,
    "exclusions": wire.exclusions,
}


def pages() -> list[Path]:
    """All pages with parts that may be made."""
    return [ROOT / "README.md", *(p for p in DOCS.rglob("*.md") if "_build" not in p.parts)]


def up_to_date(text: str) -> str:
    """The text of a page with all its parts made anew."""
    return PART.sub(_made, text)


def built(text: str) -> str:
    """The text of a page as Sphinx reads it."""
    return BUILT.sub(lambda part: _made(part).split("\n", 1)[1].removesuffix("<!-- end -->"), text)


def _made(part: re.Match[str]) -> str:
    order, _, lines = part[1].partition("\n")
    maker, *words = shlex.split(order)
    made = charts.sequence(lines) if maker == "sequence" else MAKERS[maker](*words)
    return f"<!-- made: {part[1]} -->\n{made.strip()}\n<!-- end -->".replace(
        " -->\n", "\n-->\n" if lines else " -->\n", 1
    )


def main() -> int:
    """Writes, or says what it would write."""
    parser = argparse.ArgumentParser(description="Parts of the documentation made from the code.")
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if it would")
    args = parser.parse_args()
    stale = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        fresh = up_to_date(text)
        if fresh != text:
            stale += 1
            print(page.relative_to(ROOT))
            if not args.check:
                page.write_text(fresh, encoding="utf-8")
    return int(bool(stale) and args.check)


if __name__ == "__main__":
    sys.exit(main())
