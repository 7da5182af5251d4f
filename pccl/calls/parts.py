"""`Parts`: what a `Communicator` consists of."""

from __future__ import annotations

from typing import NamedTuple

from pccl.calls.launcher import Launcher
from pccl.calls.membership import Admission, Membership


class Parts(NamedTuple):
    """The parts of a communicator, for `pccl.torch`, which makes collectives of its own of them."""

    membership: Membership
    admission: Admission
    launcher: Launcher
