"""Who may ask for what. Without a key in the settings, everybody may; with one, nobody without it.

Keys are compared as digests, in the same time whatever was sent, and are kept nowhere else: no log and no answer has
them.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Iterable, Sequence
from pathlib import Path

from mvllm.errors import ConfigError

_SCHEME = b"bearer "


class Role(enum.IntEnum):
    """What a key permits; a greater one includes the smaller ones."""

    NOBODY = 0
    USER = 1
    ADMIN = 2


class Keys:
    """The keys of one server.

    Args:
        user: Keys for everything but administration; without any, that is open.
        admin: Keys for everything; without any, administration is closed.
    """

    def __init__(self, user: Iterable[str] = (), admin: Iterable[str] = ()) -> None:
        self._user = [_digest(key.encode()) for key in user]
        self._admin = [_digest(key.encode()) for key in admin]

    @property
    def has_admin(self) -> bool:
        """Whether administration is possible at all."""
        return bool(self._admin)

    @property
    def is_open(self) -> bool:
        """Whether users need no key."""
        return not self._user

    def role(self, headers: Iterable[tuple[bytes, bytes]]) -> Role:
        """What the sender of these headers may do. Several Authorization headers count as none."""
        values = [value for name, value in headers if name == b"authorization"]
        if len(values) == 1 and values[0][: len(_SCHEME)].lower() == _SCHEME:
            digest = _digest(values[0][len(_SCHEME) :].strip())
            if _is_one_of(digest, self._admin):
                return Role.ADMIN
            if _is_one_of(digest, self._user):
                return Role.USER
        return Role.USER if self.is_open else Role.NOBODY


def read_keys(given: Sequence[str], files: Sequence[str], variable: str, value: str | None) -> list[str]:
    """All keys that the settings name, each once.

    Args:
        given: Keys themselves.
        files: Files with one key per line; lines that begin with # are left out.
        variable, value: The environment variable that may hold some, one per line, and what it holds.

    Raises:
        ConfigError: One cannot be a key, or a file cannot be read. An empty key never means an open door.
    """
    keys = [_checked(key, "--api-key") for key in given]
    for name in files:
        try:
            lines = [line.strip() for line in Path(name).read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as e:
            raise ConfigError(f"The file of API keys {name!r} cannot be read: {e}") from e
        found = [_checked(line, name) for line in lines if line and not line.startswith("#")]
        if not found:
            raise ConfigError(f"The file of API keys {name!r} holds no key. Write one per line.")
        keys += found
    if value is not None:
        keys += [_checked(key, variable) for key in value.split("\n")]
    return list(dict.fromkeys(keys))


def _checked(key: str, source: str) -> str:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"A key of {source} is empty, or has spaces or characters that no HTTP header carries.")
    return key


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _is_one_of(digest: bytes, known: Iterable[bytes]) -> bool:
    found = False
    for each in known:
        found |= hmac.compare_digest(digest, each)
    return found
