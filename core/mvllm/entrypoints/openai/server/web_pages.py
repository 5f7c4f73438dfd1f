"""The server's web pages: a playground to chat with the model, and the API documentation with a form for each route.

A page is one file, loads nothing from other servers and sends requests to this server only. Its content security policy
allows the page's own script by hash, so no injected script can run.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from starlette.responses import HTMLResponse

_PLAYGROUND = "playground"
_PART = re.compile(r"{{([\w.]+)}}")
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
_Operation = tuple[str, str, Mapping[str, Any]]


def playground_page() -> HTMLResponse:
    """The page at `/`."""
    return _page(_playground_text())


@functools.cache
def _playground_text() -> str:
    """The page with its style and its scripts, which are files of their own."""
    return _PART.sub(lambda part: _read(f"{_PLAYGROUND}/{part[1]}").rstrip(), _read(f"{_PLAYGROUND}/page.html"))


def docs_page(document: Mapping[str, Any]) -> HTMLResponse:
    """The page at `/docs`.

    Args:
        document: The OpenAPI document.
    """
    groups: dict[str, list[_Operation]] = {tag["name"]: [] for tag in document.get("tags", ())}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            groups.setdefault((operation.get("tags") or ["other"])[0], []).append((method, path, operation))
    about = {tag["name"]: tag["description"] for tag in document.get("tags", ())}
    schemas = document["components"]["schemas"]
    parts = []
    for name, members in groups.items():
        if members:
            parts.append(f'<section id="{_slug(name)}"><h2>{html.escape(name)}</h2>')
            parts.append(f"<p>{html.escape(about.get(name, ''))}</p>")
            parts += [_operation(*member, schemas) for member in members]
            parts.append("</section>")
    links = " ".join(f'<a href="#{_slug(name)}">{html.escape(name)}</a>' for name, found in groups.items() if found)
    return _page(_read("docs.html").replace("{{links}}", links).replace("{{content}}", "\n".join(parts)))


def _operation(method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """The section of one route: summary, fields, and a form to try it."""
    verb, shown = method.upper(), html.escape(path)
    summary = html.escape(operation.get("summary", ""))
    inputs = "".join(_input(parameter) for parameter in operation.get("parameters", ()))
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    fields = ""
    if content:
        example = json.dumps(content.get("example", {}), indent=2, ensure_ascii=False)
        rows = min(12, example.count("\n") + 1)
        inputs += f'<textarea name="body" rows="{rows}" aria-label="body">{html.escape(example)}</textarea>'
        name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
        if name in schemas:
            fields = f"<details><summary>Fields</summary>{_fields(schemas[name])}</details>"
    return (
        f"<details class=operation><summary><code>{verb} {shown}</code> {summary}</summary>{fields}"
        f'<form data-method="{verb}" data-path="{shown}">{inputs}<button>Send</button>'
        "<output></output></form></details>"
    )


def _input(parameter: Mapping[str, Any]) -> str:
    name, place = html.escape(parameter["name"]), html.escape(parameter["in"])
    return f'<label>{name} <input name="{name}" data-in="{place}" placeholder="{place}"></label>'


def _fields(schema: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(_kind(field))}</td></tr>"
        for name, field in schema.get("properties", {}).items()
    )
    return f"<p>{html.escape(schema.get('description', ''))}</p><table>{rows}</table>"


def _kind(field: Mapping[str, Any]) -> str:
    kinds = [_kind(each) for each in field.get("anyOf", ()) if each.get("type") != "null"]
    if kinds:
        return " or ".join(kinds)
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    return str(field.get("type", "any")) if field.get("type") else json.dumps(field.get("enum", "any"))


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower())


def _read(name: str) -> str:
    return resources.files("mvllm.entrypoints.openai.server").joinpath(name).read_text(encoding="utf-8")


def _page(text: str) -> HTMLResponse:
    hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in _SCRIPT.findall(text)]
    scripts = " ".join(f"'sha256-{each}'" for each in hashes)
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return HTMLResponse(text, headers={"content-security-policy": policy})
