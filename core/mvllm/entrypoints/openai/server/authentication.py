"""API keys and the roles that they give. Without keys in the settings, requests need none.

Keys are stored and looked up as digests, and appear in no log and no response. The time of a lookup reveals nothing
about a key: clients cannot choose the digest of what they send.
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
    """What a caller may do; a greater role includes the smaller ones."""

    UNAUTHENTICATED = 0
    USER = 1
    ADMIN = 2


@dataclass(frozen=True)
class Caller:
    """The sender of a request.

    Attributes:
        role: What the caller may do.
        key: Digest of the caller's key; None without a valid key.
    """

    role: Role
    key: bytes | None = field(default=None, repr=False)

    def may_access(self, owner: bytes | None) -> bool:
        """Whether the caller may read and change an object that belongs to the key with this digest."""
        return self.key == owner or self.role is Role.ADMIN


class APIKeys:
    """The keys of one server.

    Args:
        user: Keys for everything except administration; without any, no key is needed.
        admin: Keys for everything; without any, administration is closed.
    """

    def __init__(self, user: Iterable[str] = (), admin: Iterable[str] = ()) -> None:
        users, admins = ([_digest(key.encode()) for key in keys] for keys in (user, admin))
        self._callers = {digest: Caller(Role.USER, digest) for digest in users}
        self._callers |= {digest: Caller(Role.ADMIN, digest) for digest in admins}
        self._anonymous_caller = Caller(Role.UNAUTHENTICATED if users else Role.USER)

    def authenticate(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """The caller of a request with these headers: `Authorization: Bearer <key>`, or `x-api-key: <key>`.

        The second counts where the first has no valid key, because clients may have a key of another service, too.
        Several headers of one name count as none.
        """
        given = list(headers)
        bearers = [value for name, value in given if name == b"authorization"]
        if len(bearers) == 1 and bearers[0][: len(_SCHEME)].lower() == _SCHEME:
            caller = self._callers.get(_digest(bearers[0][len(_SCHEME) :].strip()))
            if caller is not None:
                return caller
        keys = [value for name, value in given if name == b"x-api-key"]
        if len(keys) == 1 and len(bearers) < 2:
            return self._callers.get(_digest(keys[0].strip()), self._anonymous_caller)
        return self._anonymous_caller


def read_api_keys(given: Sequence[str], files: Sequence[str], variable: str, value: str | None) -> list[str]:
    """All keys of the command line, of files and of the environment, each once.

    Args:
        given: Keys themselves.
        files: Files with one key per line; lines that begin with # are ignored.
        variable, value: Name and value of the environment variable with keys, one per line.

    Raises:
        ConfigError: A key is empty or invalid, or a file cannot be read.
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
        raise ConfigError(f"A key of {source} is empty, or has spaces or characters that HTTP headers cannot have.")
    return key


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
