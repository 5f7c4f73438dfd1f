"""Renders a chat template with Jinja, as transformers does, without importing transformers.

Templates are programs from anywhere, so they run in Jinja's sandbox and see values of JSON types only. What templates
expect of transformers beyond Jinja:

    blocks            the line break after a block and the white space before it are dropped
    break, continue   in loops
    generation        a block around the assistant's text, which changes nothing here
    tojson            without escapes for HTML
    raise_exception, strftime_now, dict, namespace   functions
    reasoning         as `reasoning_content` and as `thinking`, whichever a message has
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from mvllm.errors import ModelError, RequestError

_UNDEFINED = re.compile(r"'(\w+)' is undefined")
_UNKNOWN = re.compile(r"No (filter|test) named ")
_REASONING = ("reasoning_content", "thinking", "reasoning")


class OtherTypeError(TypeError):
    """A value for a template is of none of JSON's types."""


def render_template(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The text of a conversation.

    Args:
        template: The Jinja template.
        messages: The conversation, of JSON types.
        variables: Further variables, of JSON types, `tools` and `add_generation_prompt` among them.

    Raises:
        OtherTypeError: A value has another type.
        Exception: The template is not valid, or failed; any exception.
    """
    chat = [_with_reasoning(_as_json_types(message)) for message in messages]
    defaults = {"tools": None, "documents": None, "add_generation_prompt": False}
    return _compiled(template).render(**{**defaults, **_as_json_types(variables), "messages": chat})


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _as_json_types(value: Any) -> Any:
    """A copy without methods that the sandbox does not know.

    Raises:
        OtherTypeError: There is another type.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_as_json_types(key): _as_json_types(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_as_json_types(each) for each in value]
    if isinstance(value, tuple):
        return tuple(_as_json_types(each) for each in value)
    raise OtherTypeError(f"a {type(value).__name__} is none of JSON's types")


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: its content."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        return str(caller())


class _PublicNamespace(Namespace):
    """Jinja's `namespace`, whose attributes may not begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that an attribute may be named self
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_public(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"A chat template may not store the attribute {name!r}: it begins with an underscore.")


class _Dict:
    """`dict` without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def check_syntax(template: str, source: str) -> None:
    """Parses a template, which does not run any of it.

    Args:
        source: Where it is from, for the message.

    Raises:
        ModelError: It is not valid.
    """
    try:
        _environment().parse(template)
    except TemplateSyntaxError as e:
        raise ModelError(f"{source}, line {e.lineno}: {(e.message or '').rstrip('.')}.") from e


def template_error(error: Exception, template: str, source: str = "", parameter: str = "messages") -> RequestError:
    """The error for a template that has failed, with the line.

    Args:
        template: Its text; empty if unknown.
        source: Its file; empty if it has none, or if the reader may not know it.
        parameter: What the template was rendered for. `chat_template` replaces it if no conversation could do better.
    """
    name = f"The chat template {source}".strip()
    if type(error) is TemplateError:  # of raise_exception
        return RequestError(f"{name} refuses the conversation: {error}", parameter=parameter)
    line = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace is not None:  # Jinja puts the lines of templates into it
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == "<template>" else line
        trace = trace.tb_next
    undefined = _UNDEFINED.fullmatch(str(error))
    # A request may set variables, but not functions.
    calls_it = undefined is not None and re.search(rf"\b{undefined[1]}\s*\(", template)
    if calls_it or isinstance(error, TemplateSyntaxError) or _UNKNOWN.match(str(error)):
        parameter = "chat_template"
    where = "" if line is None else f" in line {line}"
    return RequestError(f"{name} failed{where}: {type(error).__name__}: {error}", parameter=parameter)


@lru_cache(16)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


def _environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_PublicNamespace
    )
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
