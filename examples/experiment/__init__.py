"""Measures the loss that training with little communication costs, and the bytes that it saves.

A byte-level GPT learns a text in many ways: with all gradients averaged in each step, and with the
modes, wires and numbers of peers of DiLoCo. Every run has the same seed and the same samples. The
peers are processes of this machine that exchange over real sockets, as anywhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from experiment.runner import Failed, Pool
from experiment.runner import run as run_one
from experiment.runs import VARIANTS, Point, Settings, Variant, load, save
from experiment.table import render
from pccl.cli.arguments import whole_number
from pccl.runtime.signals import ended_by, interrupt

_REQUIRED = ("torch", "matplotlib")
_DEFAULTS = Settings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument(
        "--text", nargs="+", default=[], metavar="FILE",
        help="text to learn (default: the source code of Python's standard library)",
    )  # fmt: skip
    for name, help in (
        ("width", "of the model"),
        ("layers", "of the model"),
        ("heads", "of its attention"),
        ("context", "bytes that it sees at once"),
        ("batch", "samples of a step, of all peers together: a multiple of 8"),
        ("steps", "inner steps: with the batch, how much is learnt"),
        ("inner-steps", "between two outer steps"),
        ("seed", "of weights and samples"),
    ):
        default = getattr(_DEFAULTS, name.replace("-", "_"))
        parser.add_argument(
            f"--{name}", type=whole_number(int(name != "seed")), default=default, metavar="N",
            help=f"{help} (default: {default})",
        )  # fmt: skip
    parser.add_argument(
        "--lr", type=float, default=_DEFAULTS.lr,
        help="highest learning rate of the inner optimizer (default: %(default)s)",
    )  # fmt: skip
    names = ", ".join(variant.name for variant in VARIANTS)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="RUN", help=f"make only these runs, of {names}"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("experiment-results"), metavar="DIR",
        help="results, table and plots; a run whose result is there is not made again "
        "(default: %(default)s)",
    )  # fmt: skip


def main(words: list[str] | None = None) -> int:
    """Reads the options, and runs."""
    parser = argparse.ArgumentParser("examples/experiment", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(words))


def run(args: argparse.Namespace) -> int:
    """Makes the runs that have no result yet, then the table and the plots of all that have.

    Returns:
        The exit status: 0 if every run has a result; 1 if one failed; 2 if none could start.
    """
    settings = Settings(
        text=tuple(str(Path(file).resolve()) for file in args.text),
        **{name: getattr(args, name) for name in Settings.__struct_fields__ if name != "text"},
    )
    problem = _problem(args, settings)
    if problem:
        print(f"experiment: {problem}", file=sys.stderr)
        return 2
    args.output.mkdir(parents=True, exist_ok=True)
    wanted = [v for v in VARIANTS if not args.only or v.name in args.only]
    try:
        with Pool() as pool, ended_by(interrupt):
            _make(pool, wanted, settings, args.output)
    except Failed as error:
        print(f"experiment: {error}", file=sys.stderr)
        return 1
    results = [found for v in VARIANTS if (found := load(args.output, v, settings))]
    text = render(results)
    (args.output / "table.md").write_text(text, encoding="utf-8")
    print(text)
    from experiment import plots

    for path in plots.save(results, args.output):
        print(path)
    return 0


def _problem(args: argparse.Namespace, settings: Settings) -> str | None:
    missing = [name for name in _REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        return (
            f"{' and '.join(missing)} not found: in the clone of pccl, "
            """pip install -e ".[experiment]" brings what is needed"""
        )
    unknown = {*args.only} - {variant.name for variant in VARIANTS}
    if unknown:
        return f"there is no run named {min(unknown)}: see --help"
    if settings.batch % max(variant.peers for variant in VARIANTS):
        return f"--batch {settings.batch} cannot be dealt to up to 8 peers: it takes a multiple"
    if settings.width % settings.heads:
        return f"--width {settings.width} is no multiple of --heads {settings.heads}"
    if settings.steps % settings.inner_steps:
        return f"--steps {settings.steps} is no multiple of --inner-steps {settings.inner_steps}"
    unreadable = [file for file in settings.text if not Path(file).is_file()]
    if unreadable:
        return f"there is no file {unreadable[0]}"
    return None


def _make(pool: Pool, wanted: list[Variant], settings: Settings, folder: Path) -> None:
    for number, variant in enumerate(wanted, 1):
        label = f"[{number}/{len(wanted)}] {variant.name}"
        result = load(folder, variant, settings)
        if result is None:
            result = run_one(pool, settings, variant, _Progress(label, settings))
            save(folder, result)
        print(f"{label}: {result.validation:.4f} nats per byte", file=sys.stderr, flush=True)


class _Progress:
    """A line for each point of a curve."""

    def __init__(self, label: str, settings: Settings) -> None:
        self._label, self._tokens = label, settings.tokens

    def __call__(self, point: Point) -> None:
        share = point.tokens / self._tokens
        print(f"{self._label}: {share:4.0%}, {point.validation:.4f}", file=sys.stderr, flush=True)
