"""Follows the versions that a trainer publishes."""

from __future__ import annotations

import logging
import math
import os
import threading
import time

from pccl.errors import not_picklable
from pccl.protocol import messages as m
from pccl.protocol.peer.effects import Fail
from pccl.runtime import limits
from pccl.runtime.client.call import Quiet, error_of
from pccl.security import Security
from pccl.support import Closing
from pccl.weights.client import Blob, BlobStore, Options, client, timed_out
from pccl.weights.tensors import (
    HEAD_BYTES_MAX,
    Damaged,
    Head,
    Parameters,
    Tensors,
    blob_of,
    found_digests,
    read_head,
)

log = logging.getLogger("pccl")

# The remedy if a subscriber that only dials out can reach no holder of a version.
HINT = (
    "; this subscriber only dials out (PCCL_OUTGOING_ONLY): one that has the version must be "
    "reachable, or a peer of the run relay (PCCL_RELAY=1)"
)


class Subscriber(Closing):
    """Follows the versions of parameters that a `Publisher` publishes.

    It fetches, verifies and assembles new versions in the background, in separate memory. Only
    `swap` changes the parameters. The subscriber serves its versions to other subscribers, over
    this machine's uplink. Use `relay=False` if that uplink has no spare capacity. It holds one copy
    of the parameters in host memory, and a relay holds two.

    If the publisher is gone, a subscriber keeps its version, and continues when any publisher
    publishes again. If the master is away for longer than PCCL_MASTER_PATIENCE_S, the subscriber
    ends: `wait` raises MasterLostError, and `swap` still takes the staged version.

    Args:
        master: `host:port` of the run's master; without a port, 48148.
        parameters: as for a Publisher, with the same names, element types and sizes. The first
            `swap` overwrites their whole content.
        relay: whether it serves its versions to others.
        security, advertise, port_range, connect_timeout: as for `Publisher`.

    Raises:
        MasterLostError, KickedError, ValueError, PCCLError: as for `Publisher`.
    """

    def __init__(
        self,
        master: str,
        parameters: Parameters,
        *,
        relay: bool = True,
        security: Security | str | os.PathLike[str] | None = None,
        advertise: str | None = None,
        port_range: str | None = None,
        connect_timeout: float | None = None,
    ) -> None:
        options = Options(master, security, advertise, port_range, connect_timeout)
        self._outgoing = options.config.outgoing
        self._stage = _Stage(Tensors(parameters, writable=True), relay)
        self._client = client(options, self._stage, "Subscriber", follows=True, relays=relay)

    @property
    def version(self) -> int:
        """The version in the parameters; 0: none yet."""
        return self._stage.swapped

    @property
    def staged(self) -> int:
        """The version that `swap` would take; 0: none yet."""
        return self._stage.version

    @property
    def latest(self) -> int:
        """The newest version announced by the master; 0: none yet."""
        return self._stage.latest

    def wait(self, newer_than: int | None = None, *, timeout: float | None = None) -> int:
        """Waits until a newer version is staged.

        Args:
            newer_than: a version; None: the one in the parameters.
            timeout: seconds to wait.

        Returns:
            The staged version.

        Raises:
            PCCLTimeoutError: no newer version was staged within that time; the message names the
                staged version and the published one.
            MasterLostError, KickedError: this subscriber has ended, and stages no more versions.
            PCCLError: INVALID_ARGUMENT: the published version does not fit these parameters.
        """
        stage, quiet = self._stage, Quiet()
        until_s = math.inf if timeout is None else time.monotonic() + timeout
        with stage.lock:
            while stage.version <= (stage.swapped if newer_than is None else newer_than):
                if stage.failure is not None:
                    raise error_of("wait", stage.failure)
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    assert timeout is not None
                    raise timed_out("wait", timeout, stage.lacks)
                if quiet.is_over:
                    hint = HINT if self._outgoing and stage.latest > stage.version else ""
                    log.warning(
                        "weights: waiting for %.0f s: %s%s", quiet.seconds, stage.lacks, hint
                    )
                stage.changed.wait(min(left_s, limits.SLICE_S))
            return stage.version

    def swap(self) -> int:
        """Copies the staged version into the parameters, if it is newer; only this changes them.

        It takes the time of the copy. If a version is being assembled, it waits for that first.

        Returns:
            The version in the parameters; 0: none yet.
        """
        return self._stage.swap()

    def close(self) -> None:
        """Ends the subscriber, without changing the parameters. Idempotent."""
        self._client.close("the subscriber was closed")

    def __reduce__(self) -> str | tuple[object, ...]:
        raise not_picklable(self, "make one in each process that follows")


class _Stage(BlobStore):
    """Assembles versions.

    Attributes:
        lock: held while any attribute changes.
        changed: notified after that. It is not safe to enter: see Latch.
        version: the whole, verified version; 0: none.
        swapped: the version in the parameters; 0: none.
        latest: the newest published version.
        failure: the reason why no other version will come; None: one may come.
    """

    def __init__(self, tensors: Tensors, relay: bool) -> None:
        self._tensors, self._relay = tensors, relay
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._memory = tensors.stretch()
        self._found: list[bytes] = []  # digests of what is there
        self._dirty: set[int] = set()  # tensors that differ from the parameters
        self._available: tuple[m.Package, ...] = ()
        self.version = self.swapped = self.latest = 0
        self.failure: Fail | None = None

    @property
    def lacks(self) -> str:
        """Describes the version that `wait` waits for."""
        newer = f" ({self.latest} was published)" if self.latest > self.version else ""
        return f"version {self.version} is staged, and no newer one has come{newer}"

    def swap(self) -> int:
        with self.lock:
            if self.version > self.swapped:
                self._tensors.write(self._memory, sorted(self._dirty))
                self._dirty.clear()
                self.swapped = self.version
            return self.swapped

    # ---- a BlobStore ----

    def fits(self, package: m.Package) -> bool:
        if package.head_bytes > HEAD_BYTES_MAX or package.body_bytes > self._tensors.nbytes:
            return False
        return package.base != 0 or package.body_bytes == self._tensors.nbytes

    def work_in(self, blob: Blob) -> tuple[int, Blob | None]:
        package = blob.package
        head = read_head(blob.head)
        if (head.version, head.base) != package.key or head.content != package.content:
            raise Damaged(f"the head of version {package.version} belongs to another package")
        why = self._tensors.mismatch(head)
        if why:
            raise ValueError(
                f"version {package.version} does not fit the parameters of this subscriber: {why}"
            )
        with self.lock:
            version, self.version = self.version, 0
            try:
                self._put_together(version, head, blob)
                self.version = head.version
            except Damaged as error:
                if not head.base:
                    raise
                log.warning("weights: version %d starts over: %s", head.version, error)
            more = self._whole(head) if self.version and self._relay else None
            self.changed.notify_all()
            return self.version, more

    def news(self, packages: tuple[m.Package, ...], head: int) -> str:
        wholes = [package for package in packages if package.base == 0]
        with self.lock:
            self._available = packages
            self.latest = max(self.latest, head)
        if not wholes or self.fits(wholes[-1]):
            return ""
        return (
            f"version {wholes[-1].version} has {wholes[-1].body_bytes} bytes of parameters where "
            f"{self._tensors.nbytes} are here: it is not published for parameters like these"
        )

    def over(self, fail: Fail) -> None:
        with self.lock:
            self.failure = fail
            self.changed.notify_all()

    # ---- versions ----

    def _put_together(self, version: int, head: Head, blob: Blob) -> None:
        """Applies a package to the memory; raises Damaged if the result is not its version."""
        if head.base == 0:
            self._memory[:] = blob.body
        elif head.base == version:
            self._tensors.apply(self._memory, head, blob.body)
        else:
            raise Damaged(f"it follows version {head.base}, and {version} is here")
        found = found_digests(self._tensors.within(self._memory))
        before = self._found or [b""] * len(found)
        self._dirty.update(i for i, each in enumerate(found) if each != before[i])
        self._found = found
        for tensor, digest in zip(head.tensors, found, strict=True):
            if tensor.digest != digest:
                raise Damaged(f"{tensor.name!r} is not what was published")

    def _whole(self, head: Head) -> Blob | None:
        """The whole version, if it was published, so that others can fetch it from here."""
        wanted = [one for one in self._available if one.key == (head.version, 0)]
        if not head.base or not wanted:
            return None
        found = [tensor.digest for tensor in head.tensors]
        whole = self._tensors.head(head.version, 0, found, self._tensors.sizes)
        blob = blob_of(whole, self._memory.copy())
        return blob if blob.package == wanted[0] else None
