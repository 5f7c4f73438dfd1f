"""Reads the bodies of forms with files (multipart/form-data, RFC 7578).

--boundary CRLF  headers CRLF CRLF  content CRLF  --boundary CRLF ...  --boundary--
"""

from __future__ import annotations

from email.message import Message

from mvllm.entrypoints.openai.common.errors import APIError

MAX_PARTS = 64


def parse_form(content_type: str, body: bytes) -> dict[str, list[bytes]]:
    """The contents of a form's fields by name, in their order.

    Raises:
        APIError: The body is no form, or is damaged (400).
    """
    header = _header("content-type", content_type)
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary:
        raise APIError(400, "The body must be a form with a file (Content-Type: multipart/form-data).")
    delimiter = b"--" + boundary.encode("latin-1", "replace")
    _, *parts = (b"\r\n" + body).split(b"\r\n" + delimiter, MAX_PARTS + 1)  # a body may hold millions
    if len(parts) < 2 or not parts[-1].startswith(b"--") or len(parts) > MAX_PARTS:
        raise APIError(400, f"The body is no complete form of at most {MAX_PARTS - 1} fields.")
    fields: dict[str, list[bytes]] = {}
    for part in parts[:-1]:
        head, found, content = part.partition(b"\r\n\r\n")
        name = _field_name(head.decode("utf-8", "replace")) if found else None
        if name is None:
            raise APIError(400, "A field of the form has no name.")
        fields.setdefault(name, []).append(content)
    return fields


def _field_name(head: str) -> str | None:
    for line in head.split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            name = _header("content-disposition", value.strip()).get_param("name", header="content-disposition")
            return name if isinstance(name, str) else None
    return None


def _header(name: str, value: str) -> Message:
    message = Message()
    message[name] = value.replace("\r", "").replace("\n", "")
    return message
