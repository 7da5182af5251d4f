"""The options of the sub-commands of `pccl`, as tables, read from their parsers."""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from contextlib import redirect_stdout

from pccl.cli import main as cli
from pccl.cli import plan
from pccl.cli.bench.collectives import chosen
from pccl.cli.chaos import kinds


def commands() -> str:
    """All sub-commands, each under a heading of its own."""
    return "\n\n".join(f"### {name}\n\n{_command(name)}" for name in cli.COMMANDS)


def _command(name: str) -> str:
    """What a sub-command is for, and its options, with those of the commands below it."""
    top = cli.parser(name)
    parser = _below(top)[name]
    below = _below(parser)
    parts = [f"`{_usage(parser)}`", "", str(parser.description)]
    if below:
        (choice,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parts += ["", f"| {choice.metavar} | what it does |", "| --- | --- |"]
        parts += [f"| `{one.dest}` | {one.help} |" for one in choice._choices_actions]
        parts += ["", "| option | of | what it does |", "| --- | --- | --- |"]
        whose: dict[tuple[str, str], list[str]] = {}
        for sub, inner in below.items():
            for option, text in _options(inner):
                whose.setdefault((option, text), []).append(sub)
        for (option, text), owners in whose.items():
            of = "all" if len(owners) == len(below) else ", ".join(f"`{one}`" for one in owners)
            parts.append(f"| {option} | {of} | {text} |")
    else:
        rows = [f"| {option} | {text} |" for option, text in _options(parser)]
        parts += ["", "| option | what it does |", "| --- | --- |", *rows] if rows else []
    return "\n".join(parts)


def output(*words: str) -> str:
    """What a sub-command prints."""
    with redirect_stdout(io.StringIO()) as printed:
        cli.main(list(words))
    return f"```text\n{printed.getvalue().rstrip()}\n```"


def strategies() -> str:
    """How all-reduces travel: by size, number of peers, machines and quantization."""
    groups = [(2, True), (2, False), (4, True), (4, False)]
    places = [f"{n} peers, {'one machine' if near else 'several machines'}" for n, near in groups]
    rows = [f"| float32 | {' | '.join(places)} |", f"| --- |{' --- |' * len(groups)}"]
    for text, nbytes in (
        ("64 KiB", 1 << 16),
        ("128 KiB", 1 << 17),
        ("256 KiB", 1 << 18),
        ("1 MiB", 1 << 20),
        ("64 MiB", 1 << 26),
    ):
        for how in (None, "int8"):
            cells = [
                str(chosen("all_reduce", nbytes, n, together=near, quantization=how)).partition(
                    ", lanes by"
                )[0]
                for n, near in groups
            ]
            rows.append(f"| {text}{f' as {how}' if how else ''} | {' | '.join(cells)} |")
    return "\n".join(rows)


def plans(step: str, *clusters: str) -> str:
    """What `pccl plan` recommends: each cluster is PEERS:UPLINK, with models of three sizes."""
    rows = [
        "| model | peers, uplink | recommended | an exchange | a day, each peer |",
        "| --- | --- | --- | --- | --- |",
    ]
    for params in ("100M", "1B", "7B"):
        for peers, uplink in (each.split(":") for each in clusters):
            cluster = plan.Cluster(
                plan.quantity(params), int(peers), plan.quantity(uplink), step_s=float(step)
            )
            advice = plan.advise(cluster)
            cells = ["does not fit", "", ""]
            if advice is not None:
                round_s = advice.round_s(cluster)
                settings = (
                    f'H = {advice.inner_steps}, `"{advice.mode}"`, `"{advice.exchange.name}"`'
                )
                cells = [
                    settings if advice.inner_steps else f"`{advice.call}`",
                    f"{advice.exchange.seconds:,.1f} s",
                    f"{advice.exchange.sent * plan.DAY_S / round_s / 1e9:,.0f} GB",
                ]
            links = f"{peers}, {uplink[:-1]} {uplink[-1]}bit/s"
            rows.append(f"| {params} | {links} | {' | '.join(cells)} |")
    return "\n".join(rows)


def faults() -> str:
    """The kinds of faults of `pccl chaos`."""
    rows = ["| fault | what is done | for | |", "| --- | --- | --- | --- |"]
    for name, kind in kinds.KINDS.items():
        low, high = kind.lasts_s
        lasts = f"{low:g} to {high:g} s" if high else ""
        rows.append(f"| `{name}` | {kind.text} | {lasts} | {'`--network`' * kind.network} |")
    return "\n".join(rows)


def _below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _usage(parser: argparse.ArgumentParser) -> str:
    if parser.usage:
        return parser.usage
    words = [action.metavar or action.dest for action in parser._get_positional_actions()]
    return " ".join([parser.prog, *map(str, words), "[options]"])


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        if action.help is argparse.SUPPRESS:
            continue
        value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else "")
        if not value and action.nargs != 0:
            value = action.dest.upper()
        names = ", ".join(action.option_strings)
        words = " ".join(filter(None, [names, str(value)])).replace("|", "\\|")
        text = (action.help or "") % {**vars(action), "prog": parser.prog}
        yield f"`{words}`", text.replace("|", "\\|")
