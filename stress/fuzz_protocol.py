"""Fuzzes the decoder and the master's state machine, guided by coverage.

    pip install atheris                                   # Linux, CPython 3.11 or later
    python stress/fuzz_protocol.py -max_total_time=300    # any options of libFuzzer

Each input is a script of what strangers do to a run of two honest peers
(tests/support/simulation/hostile.py). It begins from the inputs in tests/support/fuzz/corpus. What
reaches new code is collected in fuzz-inputs/, and what breaks something is left behind as crash-*:
put that into tests/support/fuzz/corpus under a name that says what it was, and pytest replays it
from then on.

    python stress/fuzz_protocol.py --keep       # the smallest part of fuzz-inputs/ into the corpus
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT / "tests" / "support" / "fuzz" / "corpus"
INPUTS = Path("fuzz-inputs")
INPUT_BYTES_MAX = 4096
KEPT_BYTES_MAX = 600  # what goes into the repository is small

sys.path.insert(0, str(ROOT / "tests" / "support"))
with atheris.instrument_imports(include=["pccl.protocol"]):
    from simulation import hostile


def play(data: bytes) -> None:
    """One input: anything but an orderly end of the run is a finding."""
    hostile.hostile_run(hostile.unpack(data))


def mutate(data: bytes, size_max: int, seed: int) -> bytes:
    """Changes bytes as libFuzzer does, or whole blows: one more, one less, or in another order."""
    draw = random.Random(seed)
    if draw.random() < 0.5:
        return bytes(atheris.Mutate(data, size_max))
    script = hostile.unpack(data)
    blow = draw.choice(hostile.draw_script(draw, 4))
    at = draw.randint(0, len(script))
    kind = draw.randrange(3) if script else 0
    if kind == 0:
        script.insert(at, blow)
    elif kind == 1:
        script.pop(at - 1)
    else:
        script.insert(at, script[draw.randrange(len(script))])
    packed = hostile.pack(script)
    return packed if len(packed) <= size_max else data[:size_max]


def main() -> None:
    INPUTS.mkdir(exist_ok=True)
    program = sys.argv[0]
    if sys.argv[1:] == ["--keep"]:
        options = ["-merge=1", f"-max_len={KEPT_BYTES_MAX}", str(CORPUS), str(INPUTS)]
        program = str(INPUTS.resolve().with_name("fuzz-merge.sh"))  # libFuzzer starts it again
        Path(program).write_text(f'exec "{sys.executable}" -P "{Path(__file__).resolve()}" "$@"\n')
        Path(program).chmod(0o755)
    else:
        options = [f"-max_len={INPUT_BYTES_MAX}", *sys.argv[1:], str(INPUTS), str(CORPUS)]
    atheris.Setup([program, *options], play, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
