"""The keys of a run, in text files: the master admits peers by them, and peers verify the master.

    master.secret   the master's key pair; only on its machine
    master.key      the master's public key; every peer needs it
    allowed         public keys of the peers that may join, one per line; the master needs it
    peer.secret     the key pair of one peer, or of all of them

`pccl keys` creates them. A key is 40 characters (Z85); a key pair file holds the public key, then
the secret key. The rest of a key's line is a comment.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pccl.errors import PCCLError, error_for
from pccl.support import KEY
from pccl.types import Result

MASTER_SECRET = "master.secret"
MASTER_KEY = "master.key"
ALLOWED = "allowed"
PEER_SECRET = "peer.secret"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, in Z85."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Security:
    """Encryption and authentication with the keys in a directory, which are read when needed.

    Methods that read keys raise PCCLError INVALID_USAGE if a file cannot be used, or if other users
    can read a secret one.

        keys = pccl.Security.from_dir("run-keys")  # `pccl keys run-keys` makes it
        comm = pccl.Communicator("the-masters-host", security=keys)

    Attributes:
        directory: holds the keys, as `pccl keys` creates them.
    """

    directory: Path

    @classmethod
    def from_dir(cls, path: str | os.PathLike[str]) -> Security:
        """Security by the keys in a directory.

        Raises:
            PCCLError: INVALID_USAGE: `path` is not a directory.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise _unusable(f"{directory} is not a directory: `pccl keys {directory}` creates it")
        return cls(directory)

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Security | None:
        """Security by the keys in the directory PCCL_CURVE_DIR; None if that is not set.

        Raises:
            PCCLError: INVALID_USAGE: it is not a directory.
        """
        path = env.get("PCCL_CURVE_DIR")
        return cls.from_dir(path) if path else None

    @classmethod
    def of(cls, security: Security | str | os.PathLike[str] | None) -> Security | None:
        """The value of a `security=` argument: itself, a directory of keys, or PCCL_CURVE_DIR.

        Raises:
            PCCLError: INVALID_USAGE: there is no such directory.
        """
        if security is None:
            return cls.from_env()
        return security if isinstance(security, Security) else cls.from_dir(security)

    def master_keys(self) -> KeyPair:
        """The master's key pair."""
        return self._pair(MASTER_SECRET)

    def peer_keys(self) -> KeyPair:
        """This peer's key pair."""
        return self._pair(PEER_SECRET)

    def master_key(self) -> str:
        """The master's public key."""
        path = self.directory / MASTER_KEY
        return _keys(path, _read(path).split(), 1)[0]

    def allowed(self) -> frozenset[str]:
        """The public keys of the peers that may join."""
        path = self.directory / ALLOWED
        lines = [line.split() for line in _read(path).splitlines()]
        return frozenset(_keys(path, words, 1)[0] for words in lines if words and words[0] != "#")

    def _pair(self, name: str) -> KeyPair:
        path = self.directory / name
        text = _read(path)
        mode = stat.S_IMODE(path.stat().st_mode)
        if os.name == "posix" and mode & 0o077:
            raise _unusable(f"other users can read {path} (mode {mode:04o}): chmod 600 {path}")
        return KeyPair(*_keys(path, text.split(), 2))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError as error:
        raise _unusable(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _unusable(f"{path} does not hold a key") from None


def _keys(path: Path, words: list[str], count: int) -> list[str]:
    """The first words, which must be keys. Errors never quote them, because they may be secret."""
    if len(words) < count or not all(KEY.fullmatch(word) for word in words[:count]):
        what = "a key" if count == 1 else "a key pair"
        raise _unusable(f"{path} does not hold {what} of 40 characters each, as `pccl keys` writes")
    return words[:count]


def _unusable(why: str) -> PCCLError:
    return error_for(Result.INVALID_USAGE, "security", why)
