"""Publishes versions of a trainer's parameters."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np

from pccl.errors import PCCLError, not_picklable
from pccl.protocol import messages as m
from pccl.protocol.peer.effects import Fail
from pccl.runtime.client.call import error_of
from pccl.security import Security
from pccl.support import Closing, whole
from pccl.types import Result
from pccl.weights.client import Blob, BlobStore, Options, client, timed_out
from pccl.weights.tensors import Bytes, Parameters, Tensors, blob_of, found_digests

# above each `version` of `publish`: leaves numbers for publishers that pass none
VERSION_MAX = 1 << 61
# It publishes another whole version after DELTAS_MAX differences, or when the differences since the
# last one have WHOLE_FROM of its bytes.
DELTAS_MAX = 64
WHOLE_FROM = 0.5


@dataclass(frozen=True, slots=True)
class Publication:
    """A published version.

    >>> published = Publication(7, delta_bytes=9_000_000, whole_bytes=None, seconds=0.4)
    >>> if published.delta_bytes is not None:
    ...     print(f"version {published.version}: {published.delta_bytes / 1e6:.0f} MB to fetch")
    version 7: 9 MB to fetch

    Attributes:
        version: its number.
        delta_bytes: bytes that a subscriber with the previous version fetches; None: no differences
            were published.
        whole_bytes: bytes that any other subscriber fetches; None: it fetches the latest whole
            version, and the differences since.
        seconds: the duration of the call, after which subscribers can fetch the version.
    """

    version: int
    delta_bytes: int | None
    whole_bytes: int | None
    seconds: float


class Publisher(Closing):
    """Publishes versions of parameters, which any number of `Subscriber`s follow.

    It holds two copies of the parameters in host memory, and the differences since the latest whole
    version, which take at most about half of another copy.

    Args:
        master: `host:port` of the run's master; without a port, 48148.
        parameters: a torch module; or numpy arrays or torch tensors by name. `publish` raises
            ValueError if they have other memory by now. A module shows that even after
            `model.half()`, unlike its `state_dict()`, which then keeps the old memory.
        security: as for a Communicator; None: PCCL_CURVE_DIR, if it is set.
        advertise, port_range: as for a Communicator.
        connect_timeout: seconds within which a master must answer; None: a minute.

    Raises:
        MasterLostError: no master answers in that time.
        KickedError: the master refuses it; the message gives the reason.
        ValueError: the parameters, or another argument, cannot be used.
        PCCLError: INVALID_USAGE: keys are missing or unsafe, or no port is free; INTERNAL_ERROR:
            the system lacks descriptors or threads.
    """

    def __init__(
        self,
        master: str,
        parameters: Parameters,
        *,
        security: Security | str | os.PathLike[str] | None = None,
        advertise: str | None = None,
        port_range: str | None = None,
        connect_timeout: float | None = None,
    ) -> None:
        self._tensors = Tensors(parameters, writable=False)
        options = Options(master, security, advertise, port_range, connect_timeout)
        self._others = _OtherPublishers()
        self._before: Bytes | None = None  # the content of the latest version
        self._before_is_served = False  # a whole version, which must not change
        self._version = 0  # the latest published one
        self._tried = 0  # the latest one, whether the master has it or not
        self._deltas: list[int] = []  # bytes of each since the latest whole version
        self._client = client(options, self._others, "Publisher", follows=False, relays=False)

    @property
    def version(self) -> int:
        """The latest version of this publisher; 0: none."""
        return self._version

    def publish(self, version: int | None = None, *, timeout: float | None = None) -> Publication:
        """Publishes the current parameters, which must not change until it returns.

        It does not wait for subscribers. If another publisher has published since this one's latest
        version, the call fails, and the next call publishes a whole version.

        Args:
            version: its number, such as the step of training; greater than any before, and less
                than 2**61. None: the next number.
            timeout: seconds to wait while the master is away; None: PCCL_MASTER_PATIENCE_S.

        Raises:
            PCCLError: INVALID_USAGE: another process has published in between, or the number is not
                greater than the latest.
            PCCLTimeoutError: the master has not answered in that time. The version may still be
                published; call again without a number, or with a greater one.
            MasterLostError, KickedError: this publisher has ended.
        """
        began_s = time.monotonic()
        if self._client.over is not None:
            raise error_of("publish", self._client.over)
        if version is None:
            version = max(self._others.latest, self._version, self._tried) + 1
        version = whole("version", version, range(1, VERSION_MAX))
        blobs = self._blobs(version)
        content, self._before = self._before, None  # until it is certain that others have it
        before, self._tried = self._tried, version
        call = self._client.call()
        self._client.publish(call, blobs)
        end = call.next(timeout)
        if end is None:
            assert timeout is not None
            raise timed_out("publish", timeout, "the master has not answered")
        if isinstance(end, Fail):
            self._tried = before
            if self._client.over is not None:
                raise error_of("publish", self._client.over)
            raise PCCLError(Result.INVALID_USAGE, "publish", f"{end.why}: publish again")
        self._before, self._version = content, version
        bytes_of = {blob.package.base == 0: blob.package.nbytes for blob in blobs}
        seconds = time.monotonic() - began_s
        return Publication(version, bytes_of.get(False), bytes_of.get(True), seconds)

    def close(self) -> None:
        """Ends the publisher. Idempotent.

        Subscribers keep their versions, and serve each other.
        """
        self._client.close("the publisher was closed")

    def __reduce__(self) -> str | tuple[object, ...]:
        raise not_picklable(self, "make one in each process that publishes")

    # ---- packages ----

    def _blobs(self, version: int) -> tuple[Blob, ...]:
        """Makes the packages of the version in the parameters."""
        new, owner = self._tensors.read()
        found = found_digests(new)
        made: list[Blob] = []
        base = self._version
        if self._before is not None:
            pieces, sizes = self._tensors.differences(self._before, new)
            body = np.frombuffer(b"".join(pieces), np.uint8)
            if body.nbytes < self._tensors.nbytes:
                head = self._tensors.head(version, base, found, sizes)
                made.append(blob_of(head, body))
                self._deltas.append(body.nbytes)
        if self._before is None or self._before_is_served:
            self._before, self._before_is_served = self._tensors.stretch(), False
        for own, one in zip(self._tensors.within(self._before), new, strict=True):
            own[:] = one
        del new, owner
        if not made or self._is_long:
            made.append(self._whole(version, found))
        return tuple(made)

    @property
    def _is_long(self) -> bool:
        enough = sum(self._deltas) > WHOLE_FROM * self._tensors.nbytes
        return enough or len(self._deltas) >= DELTAS_MAX

    def _whole(self, version: int, found: list[bytes]) -> Blob:
        assert self._before is not None
        self._before_is_served = True
        self._deltas.clear()
        head = self._tensors.head(version, 0, found, self._tensors.sizes)
        return blob_of(head, self._before)


class _OtherPublishers(BlobStore):
    """Records the latest version of any publisher."""

    def __init__(self) -> None:
        self.latest = 0

    def news(self, packages: tuple[m.Package, ...], head: int) -> str:
        self.latest = max(self.latest, head)
        return ""
