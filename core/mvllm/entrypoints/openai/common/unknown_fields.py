"""Finds unknown fields of request bodies, and warns about them or rejects the request.

A field is unknown if the struct that decodes the body has no field of that name. Objects without a fixed set of fields
(messages, tools, JSON schemas, chat_template_kwargs) are not checked. Names come from clients: only those that look
like a field's name are shown, and the number of stored names is limited.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Union, get_args, get_origin

import msgspec
from starlette.types import Scope

from mvllm.entrypoints.openai.common.errors import APIError
from mvllm.entrypoints.openai.server.settings import UnknownFieldsPolicy
from mvllm.logging import get_logger

logger = get_logger(__name__)

UNKNOWN_FIELDS_SCOPE_KEY = "mvllm.unknown_fields"
"""Key of the ASGI scope under which the names for the response's header are stored."""

UNKNOWN_FIELDS_HEADER = "x-mvllm-unknown-fields"

MAX_NAMES = 16
"""Most names that are reported for one request."""

MAX_LOGGED_NAMES = 256
"""Most names that a process logs; they are stored, so that each is logged once."""

_MAX_COLONS = 1 << 15
"""For a body with more colons only the first unknown field is reported, because a table of its fields may be large."""

_NAME = re.compile(r"[A-Za-z0-9_\-]{1,64}(\.[A-Za-z0-9_\-]{1,64})*")
_UNPRINTABLE = "?"
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)

_CLOSED_OBJECTS: dict[str, frozenset[str]] = {
    "response_format": frozenset({"type", "json_schema"}),
    "response_format.json_schema": frozenset({"name", "description", "schema", "json_schema", "strict"}),
    "text": frozenset({"format", "verbosity"}),
    "text.format": frozenset({"type", "name", "description", "schema", "strict"}),
    "reasoning": frozenset({"effort", "summary", "generate_summary"}),
}
"""The fields of objects that the structs have as mappings, by path."""


class KnownParameters:
    """The query parameters of a route.

    Args:
        names: Their names.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    def names_in(self, path: str) -> frozenset[str]:
        """The fields of the object at `path`; an empty path is the query or the body itself."""
        return frozenset() if path else self.names


class KnownFields(KnownParameters):
    """The fields of a struct type and of the structs in it.

    Args:
        body_type: The type of a body. One that is encoded as an array, or forbids unknown fields, is not checked.
    """

    def __init__(self, body_type: type[msgspec.Struct]) -> None:
        config = body_type.__struct_config__
        self.is_checked = not config.array_like and not config.forbid_unknown_fields
        fields = msgspec.structs.fields(body_type)
        tag = [config.tag_field] if config.tag_field else []
        super().__init__([field.encode_name for field in fields] + tag)
        nested = {field.encode_name: _struct_of(field.type) for field in fields}
        self._objects = [field.name for field in fields if field.encode_name in _CLOSED_OBJECTS]
        self.nested = {name: KnownFields(each) for name, each in nested.items() if each is not None}
        # Scans a body without creating its values, and raises at the first unknown field.
        plain = [(f"f{i}", msgspec.Raw, msgspec.Raw()) for i in range(len(self.names))]
        rename = {f"f{i}": name for i, name in enumerate(sorted(self.names))}
        scan = msgspec.defstruct("Scan", plain, rename=rename, forbid_unknown_fields=True, kw_only=True)
        self._attributes = {name: attribute for attribute, name in rename.items()}
        self._scan = msgspec.json.Decoder(scan)
        self._table = msgspec.json.Decoder(dict[str, msgspec.Raw])

    def find_unknown(self, body: bytes) -> list[str]:
        """Paths of the unknown fields of a valid body, at most MAX_NAMES of them."""
        if not self.is_checked:
            return []
        found: list[str] = []
        try:
            scanned = self._scan.decode(body)
            inner = {name: getattr(scanned, self._attributes[name]) for name in self.nested}
        except msgspec.ValidationError as e:
            match = _UNKNOWN.match(str(e))
            if match is None:  # the body is not an object
                return []
            if len(body) > _MAX_COLONS and body.count(b":") > _MAX_COLONS:
                return [match[1]]
            fields = self._table.decode(body)
            found += islice((name for name in fields if name not in self.names), MAX_NAMES)
            inner = {name: fields.get(name, msgspec.Raw()) for name in self.nested}
        for name, raw in inner.items():
            if raw:
                found += [f"{name}.{each}" for each in self.nested[name].find_unknown(bytes(raw))]
        return found[:MAX_NAMES]

    def find_unknown_in_mappings(self, request: msgspec.Struct) -> list[str]:
        """Paths of the unknown fields of a request's mappings, at most MAX_NAMES of them."""
        found: list[str] = []
        for name in self._objects:
            value = getattr(request, name)
            if value is not None:
                found += islice(_unknown_in_object(name, value), MAX_NAMES)
        return found[:MAX_NAMES]

    def names_in(self, path: str) -> frozenset[str]:
        """See KnownParameters."""
        if not path:
            return self.names
        return self.nested[path].names if path in self.nested else _CLOSED_OBJECTS.get(path, frozenset())


class UnknownFields:
    """Handles unknown fields.

    Args:
        policy: `warn` logs each name once and adds a header to the response, `refuse` raises, `ignore` does not check.
    """

    def __init__(self, policy: UnknownFieldsPolicy = "warn") -> None:
        self.policy = policy
        self._logged: set[str] = set()

    def handle(self, paths: Sequence[str], known: KnownParameters, scope: Scope | None = None) -> None:
        """Handles the unknown fields of one request.

        Args:
            paths: Paths of the unknown fields.
            known: The known fields, for suggestions.
            scope: ASGI scope of the request; its list under UNKNOWN_FIELDS_SCOPE_KEY, if it has one, gets the names.

        Raises:
            APIError: The policy is `refuse` (400).
        """
        shown = [path if _NAME.fullmatch(path) else _UNPRINTABLE for path in paths[:MAX_NAMES]]
        if scope is not None and isinstance(header := scope.get(UNKNOWN_FIELDS_SCOPE_KEY), list):
            header[:] = shown
        if self.policy == "refuse":
            first = shown[0]
            what = "A field of the request" if first == _UNPRINTABLE else f"The field {first}"
            raise APIError(
                400,
                f"{what} is not known.{_did_you_mean(first, known)} This server refuses unknown fields "
                "(--unknown-fields refuse).",
                param=None if first == _UNPRINTABLE else first,
                code="unknown_field",
            )
        for name in shown:
            self._log(name, known, scope)

    def _log(self, name: str, known: KnownParameters, scope: Scope | None) -> None:
        if name in self._logged or len(self._logged) > MAX_LOGGED_NAMES:
            return
        self._logged.add(name)
        if len(self._logged) > MAX_LOGGED_NAMES:
            logger.warning("%d unknown fields have been logged; no more will be.", MAX_LOGGED_NAMES)
            return
        what = "a field with an unprintable name" if name == _UNPRINTABLE else f"the unknown field {name}"
        path = getattr((scope or {}).get("route"), "path", None)
        logger.warning(
            "Ignoring %s of a request%s.%s Logged once for each field; --unknown-fields refuse rejects such requests.",
            what,
            f" to {path}" if path else "",
            _did_you_mean(name, known),
        )


def _unknown_in_object(path: str, value: object) -> Iterator[str]:
    if (
        not isinstance(value, Mapping) or value.get("type") == "structural_tag"
    ):  # the grammar library defines its fields
        return
    known = _CLOSED_OBJECTS[path]
    yield from (f"{path}.{name}" for name in value if name not in known)
    for name in known:
        if f"{path}.{name}" in _CLOSED_OBJECTS:
            yield from _unknown_in_object(f"{path}.{name}", value.get(name))


def unknown_fields_header(names: Sequence[str]) -> tuple[bytes, bytes]:
    """The response header with the unknown fields of a request, by the names of `UnknownFields.handle`."""
    text = ", ".join(dict.fromkeys(names))
    if len(text) > 512:
        text = text[:512].rpartition(", ")[0] + ", ..."
    return UNKNOWN_FIELDS_HEADER.encode(), text.encode("ascii")


def _did_you_mean(path: str, known: KnownParameters) -> str:
    """A suggestion of the known field with the most similar name; empty if there is none."""
    parent, dot, name = path.rpartition(".")
    names = sorted(known.names_in(parent))
    simple = {_simple(each): each for each in names}
    similar = simple.get(_simple(name)) or next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.75)), None)
    return f" Did you mean {parent}{dot}{similar}?" if similar else ""


def _simple(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _struct_of(kind: Any) -> type[msgspec.Struct] | None:
    """The struct type of a field, which may be optional; None for other types."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    structs = [each for each in kinds if isinstance(each, type) and issubclass(each, msgspec.Struct)]
    return structs[0] if len(structs) == 1 else None
