"""Version, changelog and tag agree, and a release makes them so or changes nothing."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def git(home: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", *words]
    return subprocess.run(command, cwd=home, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "pccl").mkdir()
    (tmp_path / "pccl" / "version.py").write_text('__version__ = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## 0.2.0 (not released)\n\n- One.\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "config", "user.name", "A")
    git(tmp_path, "config", "user.email", "a@example.org")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    return tmp_path


def test_version_and_changelog_agree_now(release: ModuleType) -> None:
    release.check(ROOT, None)


def test_a_release_sets_version_and_date_and_tags(
    release: ModuleType, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert release.main(["0.2.0"], repository) == 0
    assert "git push --atomic origin HEAD v0.2.0" in capsys.readouterr().out
    assert '__version__ = "0.2.0"' in (repository / "pccl" / "version.py").read_text()
    assert git(repository, "describe", "--exact-match").strip() == "v0.2.0"
    assert not git(repository, "status", "--porcelain")
    assert release.main(["--check", "v0.2.0"], repository) == 0
    assert release.main(["--check", "v0.3.0"], repository) == 1
    assert "the tag must be v0.2.0" in capsys.readouterr().err
    assert release.main(["0.2.0"], repository) == 1
    assert "the tag v0.2.0 exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "source", "changelog", "why"),
    [
        ("0.3.0", None, None, "the changelog's newest heading is `## 0.2.0 (not released)`"),
        ("0.2", None, None, "'0.2' is not a version such as 0.2.0"),
        ("0.2.0", '__version__ = "0.3.0"\n', None, "version.py says 0.3.0 already"),
        ("0.2.0", "\n", None, "version.py has 0 lines `__version__ = ...`"),
        ("0.2.0", None, "# Changes\n", "CHANGELOG.md has no heading such as"),
        ("0.2.0", None, "## 0.2.0 (2026-01-31)\n", "not `## 0.2.0 (not released)`"),
    ],
)
def test_a_refused_release_changes_nothing(
    version: str,
    source: str | None,
    changelog: str | None,
    why: str,
    release: ModuleType,
    repository: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in (("pccl/version.py", source), ("CHANGELOG.md", changelog)):
        if text is not None:
            (repository / name).write_text(text)
            git(repository, "commit", "--quiet", "--all", "--message", "another")
    before = git(repository, "rev-parse", "HEAD")
    assert release.main([version], repository) == 1
    assert why in capsys.readouterr().err
    assert git(repository, "rev-parse", "HEAD") == before
    assert not git(repository, "status", "--porcelain") and not git(repository, "tag")


def test_a_tree_with_changes_is_refused(
    release: ModuleType, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "more").touch()
    assert release.main(["0.2.0"], repository) == 1
    assert "commit or stash first:\n?? more" in capsys.readouterr().err


def test_a_changelog_of_another_version_is_noticed(release: ModuleType, repository: Path) -> None:
    with pytest.raises(release.Refused, match=r"says 0\.1\.0, the changelog's newest heading"):
        release.check(repository, None)
