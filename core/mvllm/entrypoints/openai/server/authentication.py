"""API keys and the roles that they give. Without keys in the settings, requests need none.

Keys are stored and looked up as digests, and appear in no log and no response. The time of a lookup reveals nothing
about a key: clients cannot choose the digest of what they send.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from mvllm.errors import ConfigError

_SCHEME = b"bearer "


class Role(enum.IntEnum):
    """What a caller may do; a greater role includes the smaller ones."""

    UNAUTHENTICATED = 0
    USER = 1
    ADMIN = 2


@dataclass(frozen=True)
class KeyLimits:
    """What one key may use; None for no limit.

    Attributes:
        requests_per_minute: Requests that it may start.
        tokens_per_minute: Tokens of prompts and outputs.
        concurrent_requests: Requests in flight.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


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
        users, admins = ([key_digest(key) for key in keys] for keys in (user, admin))
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
        files: Files with one key per line, and its limits behind it; lines that begin with # are ignored.
        variable, value: Name and value of the environment variable with keys, one per line.

    Raises:
        ConfigError: A key is empty or invalid, or a file cannot be read.
    """
    keys = [_checked(key, "--api-key") for key in given]
    for name in files:
        found = [_checked(key, name) for key, _ in _read_lines(name)]
        if not found:
            raise ConfigError(f"The file of API keys {name!r} holds no key. Write one per line.")
        keys += found
    if value is not None:
        keys += [_checked(key, variable) for key in value.split("\n")]
    return list(dict.fromkeys(keys))


def read_key_limits(files: Iterable[str], default: KeyLimits) -> dict[str, KeyLimits]:
    """The limits of the keys that have some in their files: `KEY requests_per_minute=60 concurrent_requests=4`.

    Args:
        default: The limits that a line does not name.

    Raises:
        ConfigError: A limit is unknown or not a positive integer, or a file cannot be read.
    """
    lines = [line for file in files for line in _read_lines(file)]
    return {key: replace(default, **limits) for key, limits in lines if limits}


def _read_lines(file: str) -> list[tuple[str, dict[str, int]]]:
    """The keys of a file, and the limits behind each."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as e:
        raise ConfigError(f"The file of API keys {file!r} cannot be read: {e}") from e
    words = [line.split() for line in lines]
    return [(first, _limits(file, rest)) for first, *rest in filter(None, words) if not first.startswith("#")]


def _limits(file: str, settings: Sequence[str]) -> dict[str, int]:
    names, found = [each.name for each in fields(KeyLimits)], {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in names or not (value.isascii() and value.isdecimal() and int(value[:16]) > 0 and len(value) < 16):
            raise ConfigError(
                f"The file of API keys {file!r} has something behind a key that is no limit. Limits are "
                f"{', '.join(names)}, each with = and a positive integer, separated by spaces. Keys have no spaces."
            )
        found[name] = int(value)
    return found


def key_digest(key: str) -> bytes:
    """The digest under which a key is stored."""
    return _digest(key.encode())


def _checked(key: str, source: str) -> str:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"A key of {source} is empty, or has spaces or characters that HTTP headers cannot have.")
    return key


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
