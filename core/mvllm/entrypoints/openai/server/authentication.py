"""Who may ask for what. Without a key in the settings, everybody may; with one, nobody without it.

Keys are kept and looked up as digests, and nowhere else: no log and no answer has them. How long a look-up takes tells
nothing of a key, as nobody can choose the digest of what he sends, and does not depend on how many there are.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mvllm.errors import ConfigError

_SCHEME = b"bearer "


class Role(enum.IntEnum):
    """What a key permits; a greater one includes the smaller ones."""

    UNAUTHENTICATED = 0
    USER = 1
    ADMIN = 2


@dataclass(frozen=True)
class Caller:
    """Who has sent a request.

    Attributes:
        role: What the caller may do.
        key: The digest of the caller's key; None without one, or with one that is not known.
    """

    role: Role
    key: bytes | None = field(default=None, repr=False)

    def may_access(self, owner: bytes | None) -> bool:
        """Whether the caller may see and change what was made for the holder of a key, by its digest."""
        return self.key == owner or self.role is Role.ADMIN


class APIKeys:
    """The keys of one server.

    Args:
        user: Keys for everything but administration; without any, that is open.
        admin: Keys for everything; without any, administration is closed.
    """

    def __init__(self, user: Iterable[str] = (), admin: Iterable[str] = ()) -> None:
        users, admins = ([_digest(key.encode()) for key in keys] for keys in (user, admin))
        self._callers = {digest: Caller(Role.USER, digest) for digest in users}
        self._callers |= {digest: Caller(Role.ADMIN, digest) for digest in admins}
        self._anonymous_caller = Caller(Role.UNAUTHENTICATED if users else Role.USER)

    def authenticate(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Who has sent these headers. Several Authorization headers count as none."""
        values = [value for name, value in headers if name == b"authorization"]
        if len(values) == 1 and values[0][: len(_SCHEME)].lower() == _SCHEME:
            return self._callers.get(_digest(values[0][len(_SCHEME) :].strip()), self._anonymous_caller)
        return self._anonymous_caller


def read_api_keys(given: Sequence[str], files: Sequence[str], variable: str, value: str | None) -> list[str]:
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
