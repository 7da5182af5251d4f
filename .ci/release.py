"""Makes a release, or checks that what names its version agrees.

    python .ci/release.py 0.2.0            sets the version and the date, commits and tags
    python .ci/release.py 0.2.0 --push     the same, and publishes: the tag starts the workflow
    python .ci/release.py --check [v0.2.0] changes nothing; 1 if version, changelog and tag differ

RELEASING.md says what comes before and after it.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
HEADING = re.compile(r"^## (\S+) \((not released|\d{4}-\d\d-\d\d)\)$", re.MULTILINE)
NOT_YET = "not released"
SOURCE = "pccl/version.py"


class Refused(Exception):
    """There is a reason not to release; nothing was changed."""


def read(root: Path, name: str) -> str:
    """A file of the repository."""
    return (root / name).read_text(encoding="utf-8")


def named(root: Path) -> tuple[str, str, str]:
    """The version of the package; the newest one of the changelog, and its date.

    Raises:
        Refused: one of them has none.
    """
    versions = VERSION.findall(read(root, SOURCE))
    if len(versions) != 1:
        raise Refused(f"{SOURCE} has {len(versions)} lines `__version__ = ...`, and not one")
    newest = HEADING.search(read(root, "CHANGELOG.md"))
    if newest is None:
        raise Refused(f"CHANGELOG.md has no heading such as `## 0.2.0 ({NOT_YET})`")
    return versions[0], newest[1], newest[2]


def check(root: Path, tag: str | None) -> None:
    """Raises Refused unless version and changelog agree, and a tag with them."""
    version, newest, date = named(root)
    if version != newest:
        raise Refused(f"{SOURCE} says {version}, the changelog's newest heading {newest}")
    if tag is None:
        return
    if tag != f"v{version}":
        raise Refused(f"the tag is {tag}, the version {version}: the tag must be v{version}")
    if date == NOT_YET:
        raise Refused(f"the tag is {tag}, but the changelog says that {version} is not released")


def git(root: Path, *words: str) -> str:
    """What git says.

    Raises:
        Refused: it has failed.
    """
    ended = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    if ended.returncode:
        raise Refused(f"git {' '.join(words)}: {ended.stderr.strip()}")
    return ended.stdout.strip()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def release(root: Path, version: str, today: datetime.date) -> None:
    """Sets version and date, commits, and tags.

    Raises:
        Refused: the tree has changes, the tag exists, or the changelog has no entry to release.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise Refused(f"{version!r} is not a version such as 0.2.0")
    if changed := git(root, "status", "--porcelain"):
        raise Refused(f"commit or stash first:\n{changed}")
    if git(root, "tag", "--list", f"v{version}"):
        raise Refused(f"the tag v{version} exists already")
    before, newest, date = named(root)
    if _numbers(version) < _numbers(before):
        raise Refused(f"{SOURCE} says {before} already, which is above {version}")
    if newest != version or date != NOT_YET:
        wanted = f"`## {version} ({NOT_YET})`"
        raise Refused(f"the changelog's newest heading is `## {newest} ({date})`, not {wanted}")
    for name, old, new in (
        (SOURCE, f'__version__ = "{before}"', f'__version__ = "{version}"'),
        ("CHANGELOG.md", f"## {version} ({NOT_YET})", f"## {version} ({today:%Y-%m-%d})"),
    ):
        (root / name).write_text(read(root, name).replace(old, new, 1), encoding="utf-8")
    check(root, f"v{version}")
    git(root, "commit", "--all", "--message", f"Release {version}")
    git(root, "tag", "--annotate", f"v{version}", "--message", f"pccl {version}")


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """1 if it is refused, with the reason."""
    parser = argparse.ArgumentParser(description="Makes a release of pccl.")
    parser.add_argument("version", nargs="?", help="such as 0.2.0; with --check a tag, v0.2.0")
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--push", action="store_true", help="publish it")
    args = parser.parse_args(argv)
    try:
        if args.check:
            check(root, args.version)
            return 0
        if args.version is None:
            parser.error("which version?")
        release(root, args.version, datetime.date.today())
        publish = ["push", "--atomic", "origin", "HEAD", f"v{args.version}"]
        if args.push:
            git(root, *publish)
        else:
            print(f"committed and tagged; to publish it: git {' '.join(publish)}")
    except Refused as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
