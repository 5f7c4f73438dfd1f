"""Reads and decodes JSON bodies of requests, within limits of size, time and number of values."""

from __future__ import annotations

import asyncio
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar, Union, get_args, get_origin
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request
from starlette.types import Message, Receive, Scope

from mvllm.entrypoints.openai.common.errors import APIError
from mvllm.entrypoints.openai.common.streaming_response import ClientDisconnected
from mvllm.entrypoints.openai.common.unknown_fields import (
    UNKNOWN_FIELDS_SCOPE_KEY,
    KnownFields,
    KnownParameters,
    UnknownFields,
)
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.executor.process.process_utils import gc_paused

T = TypeVar("T", bound=msgspec.Struct)

MAX_CONTAINERS = 1 << 18
"""Lists, objects and fields of a body: creating and freeing more would block the event loop."""

MAX_STRINGS = 1 << 20
"""Strings of a body, with the names of fields; for the same reason."""

MAX_VALUES = 1 << 22
"""Values of a body, with the entries of lists; for the same reason."""

MAX_TIMEOUTS_PER_BODY = 10
"""The time limit of a whole body, in multiples of that of its next part."""

SMALL_BODY_BYTES = 64 << 10
_SMALL_BODIES = re.compile(
    r"/api/show|/models/(un)?load|/v1/(un)?load_lora_adapter|/v1/conversations/[^/]+|/v1/chat/completions/[^/]+"
    r"|/v1/responses/[^/]+/cancel"
)
"""Paths whose bodies have a few short fields: SMALL_BODY_BYTES are read at most."""

_WRONG_TYPE = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_TYPE_WORDS = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
    "array": "an array",
    "object": "an object",
}
"""msgspec's names of types, in JSON's words."""
_PATH = re.compile(r" - at `\$((?:\.\w+|\[[.\w]*\])+)`$")


class BodyReader:
    """Reads request bodies.

    Args:
        max_bytes: Longest body.
        timeout: Seconds between two parts of a body; the whole may take MAX_TIMEOUTS_PER_BODY times as long.
        unknown_fields: Handles fields that the body's struct does not have.
    """

    def __init__(self, max_bytes: int, timeout: float, unknown_fields: UnknownFields | None = None) -> None:
        self.max_bytes = max_bytes
        self._timeout = timeout
        self._unknown_fields = unknown_fields or UnknownFields()

    @classmethod
    def from_settings(cls, settings: ServerSettings) -> BodyReader:
        """A reader with the limits of the server's settings."""
        return cls(settings.max_body_bytes, settings.body_timeout, UnknownFields(settings.unknown_fields))

    async def decode(self, request: Request, decoder: BodyDecoder[T]) -> T:
        """The body of a request as a struct. Unknown fields are reported.

        Raises:
            APIError: As `read` and `BodyDecoder.decode`, or a field is unknown and the policy is `refuse` (400).
            ClientDisconnected: The client left.
        """
        return decoder.decode(await self.read(request), self._unknown_fields, request.scope)

    async def read(self, request: Request) -> bytes:
        """The whole body. A JSON object may come without the header of JSON, as `curl -d` sends it.

        Raises:
            APIError: The body is too long (413), is not JSON (415), or does not arrive in time (408).
            ClientDisconnected: The client left.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
        if not is_json and not _may_send_json_as_other(kind, request.headers):
            raise _not_json_error()
        body = await self.read_any(request)
        if not is_json and not body.lstrip().startswith(b"{"):  # a form, or a text
            raise _not_json_error()
        return body

    async def read_any(self, request: Request) -> bytes:
        """The whole body, which need not be JSON.

        Raises:
            APIError: The body is too long (413), or does not arrive in time (408).
            ClientDisconnected: The client left.
        """
        most = self._max_bytes(request.scope["path"])
        claimed = request.headers.get("content-length", "")
        if claimed.isdecimal() and (len(claimed) > 18 or int(claimed) > most):
            raise _body_too_long_error(most)
        parts: list[bytes] = []
        limited = self.limit_receive(request.receive, most)
        while True:
            message = await limited()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def report_unknown(self, paths: Sequence[str], scope: Scope) -> None:
        """Reports parts of a body that are not known, after those that `decode` has reported.

        Args:
            paths: Their paths.
            scope: ASGI scope of the request.

        Raises:
            APIError: There are some and the policy is `refuse` (400).
        """
        if paths and self._unknown_fields.policy != "ignore":
            before = scope.get(UNKNOWN_FIELDS_SCOPE_KEY, [])
            self._unknown_fields.handle([*before, *paths], KnownParameters(()), scope)

    def check_query(self, request: Request, *known: str) -> None:
        """Reports query parameters that are not among `known`.

        Raises:
            APIError: A parameter is unknown and the policy is `refuse` (400).
        """
        unknown = [name for name in request.query_params if name not in known]
        if unknown and self._unknown_fields.policy != "ignore":
            self._unknown_fields.handle(unknown, KnownParameters(known), request.scope)

    def read_query(self, request: Request, kind: type[T]) -> T:
        """As the function `read_query`. Unknown parameters are reported.

        Raises:
            APIError: As there, or a parameter is unknown and the policy is `refuse` (400).
        """
        self.check_query(request, *(field.encode_name for field in msgspec.structs.fields(kind)))
        return read_query(request, kind)

    def limit_receive(self, receive: Receive, max_bytes: int | None = None) -> Receive:
        """An ASGI `receive` that raises as `read` if the body exceeds a limit.

        Args:
            max_bytes: Longest body of this request; None for that of the server.
        """
        most = self.max_bytes if max_bytes is None else max_bytes
        length, deadline = 0, 0.0
        has_ended = False

        async def receive_limited() -> Message:
            nonlocal length, deadline, has_ended
            if has_ended:
                return await receive()  # returns when the client disconnects
            now = asyncio.get_running_loop().time()
            deadline = deadline or now + self._timeout * MAX_TIMEOUTS_PER_BODY
            try:
                async with asyncio.timeout_at(min(now + self._timeout, deadline)):  # no task, unlike `wait_for`
                    message = await receive()
            except TimeoutError:
                raise APIError(408, f"The body did not arrive within {self._timeout:g} s.", close=True) from None
            length += len(message.get("body", b""))
            if length > most:
                raise _body_too_long_error(most)
            has_ended = not message.get("more_body", False)
            return message

        return receive_limited

    def _max_bytes(self, path: str) -> int:
        return min(self.max_bytes, SMALL_BODY_BYTES) if _SMALL_BODIES.fullmatch(path) else self.max_bytes


def _body_too_long_error(max_bytes: int) -> APIError:
    return APIError(413, f"The body is longer than the {max_bytes} bytes allowed.", close=True)


class BodyDecoder(Generic[T]):
    """Decodes bodies into structs of one type."""

    def __init__(self, body_type: type[T]) -> None:
        self._type = body_type
        self._decoder = msgspec.json.Decoder(body_type)
        self._known_fields = KnownFields(body_type)

    def decode(self, body: bytes, unknown_fields: UnknownFields | None = None, scope: Scope | None = None) -> T:
        """The body as a struct.

        Args:
            unknown_fields: Reports unknown fields; None ignores them.
            scope: ASGI scope of the request.

        Raises:
            APIError: The body is not JSON, a field has the wrong type, or a field is unknown and the policy is `refuse`
                (400). The message repeats nothing of the body except the name of an unknown field.
        """
        _check_size(body)
        reports = unknown_fields is not None and unknown_fields.policy != "ignore"
        try:
            with gc_paused():  # it would traverse the new objects repeatedly
                request = self._decode(body)
            unknown = self._known_fields.find_unknown(body) if reports else []  # raises if an unknown name is not UTF-8
        except msgspec.ValidationError as e:
            raise field_type_error(str(e)) from None
        except RecursionError:
            raise APIError(400, "The body is nested too deeply.") from None
        except UnicodeDecodeError as e:
            raise APIError(400, f"The body is not valid UTF-8: byte {e.object[e.start]}.") from None
        except (msgspec.DecodeError, ValueError) as e:
            reason = str(e) if isinstance(e, msgspec.DecodeError) else "a number is too long"
            raise APIError(400, f"The body is not valid JSON: {reason}.") from None
        if reports and unknown_fields is not None:
            unknown += self._known_fields.find_unknown_in_mappings(request)
            if unknown:
                unknown_fields.handle(unknown, self._known_fields, scope)
        return request

    def _decode(self, body: bytes) -> T:
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as e:
            if "got `float`" not in str(e):
                raise
        return convert_with_integral_floats(msgspec.json.decode(body), self._type)


def convert_with_integral_floats(value: Any, body_type: type[T]) -> T:
    """Converts decoded JSON to a struct. A number such as 4.0 is an integer where only integers are valid: clients in
    languages without integers write them so.

    Raises:
        msgspec.ValidationError: A field has the wrong type.
    """
    return msgspec.convert(_with_integers(value, body_type), body_type)


def read_query(request: Request, kind: type[T]) -> T:
    """The query parameters of a request as a struct: its fields are texts, numbers, booleans and lists of these.

    Raises:
        APIError: A value has the wrong type, or is missing (400).
    """
    given = request.query_params
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        name = field.encode_name
        if name in given:
            values[name] = given.getlist(name) if _may_be_list(field.type) else given[name]
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as e:
        match = _PATH.search(str(e)) or re.search("field `(.*)`$", str(e))
        name = re.split(r"[.\[]", match[1].lstrip("."))[0] if match else ""
        raise APIError(400, f"The value of the parameter {name!a} is not valid.", param=name) from None


def _may_be_list(kind: Any) -> bool:
    return any(get_origin(each) is list for each in (kind, *get_args(kind)))


def convert_fields(value: Any, kind: type[T], *, within: str) -> T:
    """Converts a field of a body, which is decoded JSON, to a struct.

    Args:
        within: The field's name, for errors.

    Raises:
        APIError: A field within it has the wrong type (400).
    """
    try:
        return convert_with_integral_floats(value, kind)
    except msgspec.ValidationError as e:
        raise field_type_error(str(e), within) from None


def _with_integers(value: Any, kind: Any) -> Any:
    """`value` with integers in place of integral floats, as far as `kind` allows no floats there."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if isinstance(value, float):
        wants_integer = int in kinds and float not in kinds
        return int(value) if wants_integer and value.is_integer() and abs(value) < 1 << 53 else value
    if isinstance(value, list):
        entries = [get_args(each)[0] for each in kinds if get_origin(each) is list]
        return [_with_integers(each, Union[tuple(entries)]) for each in value] if entries else value  # noqa: UP007
    if isinstance(value, dict) and (fields := _fields_of_structs(kinds)):
        return {name: _with_integers(each, fields[name]) if name in fields else each for name, each in value.items()}
    return value


def _fields_of_structs(kinds: Sequence[Any]) -> dict[str, Any]:
    """The types of the fields of all structs among some types, by their names in JSON."""
    structs = [each for each in kinds if isinstance(each, type) and issubclass(each, msgspec.Struct)]
    return {field.encode_name: field.type for each in structs for field in msgspec.structs.fields(each)}


def _may_send_json_as_other(kind: str, headers: Mapping[str, str]) -> bool:
    """Whether a JSON body is accepted with this media type.

    A page of any site can have a browser send these types without asking the server first, but not
    `application/json`. So they are accepted only from programs and from pages of this server.
    """
    if kind not in ("", "application/x-www-form-urlencoded", "text/plain", "application/octet-stream"):
        return False
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return False
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc.lower() == headers.get("host", "").lower()


def _not_json_error() -> APIError:
    return APIError(415, "Send the body as JSON, with the header Content-Type: application/json.")


def _check_size(body: bytes) -> None:
    """Checks the number of values in a body without creating them.

    Raises:
        APIError: There are too many (400).
    """
    if len(body) > MAX_VALUES and body.count(b",") > MAX_VALUES:
        raise APIError(400, f"The body has more than {MAX_VALUES} values.")
    num_quotes = body.count(b'"') if len(body) > MAX_STRINGS else 0
    if num_quotes > 2 * MAX_STRINGS and num_quotes - body.count(b'\\"') > 2 * MAX_STRINGS:
        raise APIError(400, f"The body has more than {MAX_STRINGS} strings.")
    if len(body) <= MAX_CONTAINERS or not _has_many_nodes(body):
        return
    if _has_many_nodes(_without_strings(body)):  # strings may contain these characters
        raise APIError(400, f"The body has more than {MAX_CONTAINERS} lists, objects and fields.")


def _has_many_nodes(body: bytes) -> bool:
    return max(body.count(b"[") + body.count(b"{"), body.count(b":")) > MAX_CONTAINERS


def _without_strings(body: bytes) -> bytes:
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(plain.split(b'"')[::2])


def field_type_error(text: str, within: str = "") -> APIError:
    """The error for a field with the wrong type (400).

    Args:
        text: The text of msgspec's ValidationError.
        within: The field that has been converted; empty for the whole body.
    """
    match = _PATH.search(text)
    reason, below = (text, "") if match is None else (text[: match.start()], match[1])
    path = f"{within}{below}".lstrip(".") or "The body"
    field = re.split(r"[.\[]", path)[0] if within or below else None
    types = _WRONG_TYPE.fullmatch(reason)
    if types is not None and {*types[1].split(" | "), types[2]} <= _TYPE_WORDS.keys():
        expected = [_TYPE_WORDS[each] for each in types[1].split(" | ")]
        found = "a decimal number" if types[2] == "float" else _TYPE_WORDS[types[2]]
        listed = " or ".join(filter(None, (", ".join(expected[:-1]), expected[-1])))
        return APIError(400, f"{path} must be {listed}, found {found}.", param=field)
    return APIError(400, f"{path}: {reason.replace('`', '')}.", param=field)
