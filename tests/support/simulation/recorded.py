"""Simulated runs that record the inputs of their masters, as an event log does."""

from __future__ import annotations

from typing import Any

import msgspec

from pccl.protocol.master import Journal, Master, inputs
from pccl.protocol.master.effects import Effect
from pccl.protocol.master.eventlog import Line, Recorder, exception_text
from simulation.programs import ProgramRun, Scenario

STEPS_MAX = 20_000


class Recording:
    """A master that records its inputs."""

    def __init__(self, master: Master, play: RecordedRun) -> None:
        self.master, self.play = master, play

    def __getattr__(self, name: str) -> Any:
        return getattr(self.master, name)

    def reborn(self) -> tuple[Journal | None, list[Effect]]:
        journal, effects = self.master.reborn()
        self.play.effects_of_reborn = effects
        return journal, effects

    def feed(self, event: inputs.Event) -> list[Effect]:
        recovering = self.master.recovering
        try:
            effects = self.master.feed(event)
        except Exception as error:
            self.play.note(event, [], exception_text(error))
            raise
        if self.play.recorder.matters(event, recovering, effects):
            self.play.note(event, effects)
        return effects


class RecordedRun(ProgramRun):
    """A run of a scenario; `lines` is the log, as it is written."""

    def __init__(self, scenario: Scenario) -> None:
        self.lines: list[bytes] = []
        self.recorder = Recorder(b"a key")
        self.effects_of_reborn: list[Effect] | None = None
        super().__init__(scenario)

    def _new_master(self, number: int, journal: Journal | None = None) -> Master:
        master = super()._new_master(number, journal)
        anew = self.effects_of_reborn is not None
        began = inputs.Began(
            number, self.straggler_s, journal, "it dozed" if anew else "", self.small_max
        )
        self.note(began, self.effects_of_reborn or [])
        self.effects_of_reborn = None
        return Recording(master, self)  # type: ignore[return-value]

    def note(self, event: inputs.Input, effects: list[Effect], failed: str = "") -> None:
        at_s = getattr(self, "now_s", 0.0)  # the first master begins before there is a time
        line = self.recorder.line(at_s, event, effects, failed)
        self.lines.append(msgspec.json.encode(line))

    @property
    def record(self) -> list[Line]:
        """The log, as it is read."""
        decoder = msgspec.json.Decoder(Line)
        return [decoder.decode(line) for line in self.lines]


def play(scenario: Scenario) -> RecordedRun:
    """Plays a scenario to the end."""
    run = RecordedRun(scenario)
    run.finish(STEPS_MAX)
    return run
