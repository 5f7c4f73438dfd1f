"""StructuredOutputsParams: the constraint on the text of an output, and the limits on its size.

Nothing is compiled here. The constructor checks what is cheap: that there is exactly one constraint, its type, its size
and its nesting. All other errors are found when `mvllm.structured_output` compiles it in a sandbox.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn, TypeGuard

import msgspec

from mvllm.errors import RequestError
from mvllm.messages.named_parameters import NamedParameters

MAX_GRAMMAR_BYTES = 256 << 10
"""A schema, pattern, grammar or list of choices, as UTF-8."""

MAX_CHOICES = 10_000
MAX_NESTING = 64
"""Levels of nesting in a JSON schema."""

MAX_WHITESPACE_PATTERN = 256
MAX_TAG = 64
"""Bytes of `thoughts_start` and `thoughts_end`, as UTF-8."""

MAX_TAGS = 128
"""Structures, and triggers, of a structural tag."""

STRUCTURE_STYLES = (
    "json",
    "numbered_json",
    "python",
    "qwen_xml",
    "glm_xml",
    "glm_compact_xml",
    "minimax_xml",
    "deepseek_xml",
)
"""How the arguments of a structure are written; see `mvllm.structured_output.structural_tag`."""

FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_NAME = "structured_outputs"


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True, metaclass=NamedParameters):
    """A constraint on the text of an output: exactly one of `json`, `regex`, `choice`, `grammar`, `json_object` and
    `structural_tag`.

    Attributes:
        json: A JSON schema, as an object or as text; stored as text. Properties appear in the schema's order.
        regex: A regular expression that all of the text matches. No look-around and no back-references; the classes
            \\d, \\w and \\s are those of ASCII.
        choice: The texts of which the output is one, none empty.
        grammar: A context-free grammar, either in Lark's notation (`start: ...`) or in EBNF (`root ::= ...`).
        json_object: True for any JSON object.
        structural_tag: Any text, with JSON between tags: `{"structures": [{"begin": "<f=a>", "schema": {...}, "end":
            "</f>"}, ...], "triggers": ["<f="]}`, as an object or as text; stored as text. After a trigger, one of the
            structures that begin with it must follow.
        whitespace_pattern: Regular expression of the white space allowed between the parts of JSON; by default a line
            break and an indentation of up to 32, or up to 4 spaces.
        disable_any_whitespace: No white space between the parts of JSON.
        thoughts_end: End of reasoning, such as `</think>`: any text is allowed before it, the constraint applies after.
        thoughts_start: Start of reasoning, such as `<think>`: if the output does not begin with it, the constraint
            applies at once. None if the output begins within the reasoning.

    Raises:
        RequestError: There is not exactly one constraint, or it has the wrong type, is too large or nested too deep.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    thoughts_start: str | None = None
    thoughts_end: str | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:
            self.json_object = None
        given = [form for form in FORMS if getattr(self, form) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none of them"
            _reject(f"needs exactly one of {', '.join(FORMS)}; found {found}")
        form = given[0]
        self._check_constraint(form)
        self._check_white_space(form)
        for name in ("thoughts_start", "thoughts_end"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name), may_be_empty=False, limit=MAX_TAG)
        if self.thoughts_start is not None and self.thoughts_end is None:
            _reject("takes thoughts_start together with thoughts_end only")

    def _check_constraint(self, form: str) -> None:
        """Checks the constraint that is set, and writes it as text if it is a dict."""
        match form:
            case "json":
                self.json = _schema_text(self.json)
            case "regex":
                _check_text("regex", self.regex, may_be_empty=False)
            case "choice":
                self.choice = _checked_choices(self.choice)
            case "grammar":
                _check_text("grammar", self.grammar, may_be_empty=False)
            case "structural_tag":
                self.structural_tag = _structural_tag_text(self.structural_tag)
            case "json_object" if self.json_object is not True:
                _reject(f"json_object must be True or unset; found a {type(self.json_object).__name__}")

    def _check_white_space(self, form: str) -> None:
        """Checks the settings of white space for a constraint."""
        if not isinstance(self.disable_any_whitespace, bool):
            _reject("disable_any_whitespace must be True or False")
        if self.whitespace_pattern is not None:
            _check_text("whitespace_pattern", self.whitespace_pattern, limit=MAX_WHITESPACE_PATTERN)
        if (self.whitespace_pattern is not None or self.disable_any_whitespace) and not form.startswith("json"):
            _reject(f"whitespace_pattern and disable_any_whitespace apply to JSON only, but the constraint is {form}")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            _reject("takes whitespace_pattern or disable_any_whitespace, not both")

    @property
    def form(self) -> str:
        """The name of the constraint that is set."""
        return next(form for form in FORMS if getattr(self, form) is not None)


def as_structured_outputs(name: str, value: object) -> StructuredOutputsParams | None:
    """Checks a value of `SamplingParams.structured_outputs`: the struct, a dict of its fields, or None.

    Raises:
        RequestError: It is none of these.
    """
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, dict):
        _reject(f"must be StructuredOutputsParams or a dict of its fields; got a {type(value).__name__}")
    known = StructuredOutputsParams.__struct_fields__
    for key in value:
        if key not in known:
            _reject(f"has the fields {', '.join(known)}; found {ascii(key)[:40]}")
    return StructuredOutputsParams(**value)


def _reject(message: str) -> NoReturn:
    raise RequestError(f"{_NAME} {message}.", parameter=_NAME)


def _check_text(name: str, value: object, *, may_be_empty: bool = True, limit: int = MAX_GRAMMAR_BYTES) -> str:
    if not isinstance(value, str):
        _reject(f"{name} must be a text; found a {type(value).__name__}")
    if not may_be_empty and not value.strip():
        _reject(f"{name} is empty")
    if len(value) > limit:  # before it is encoded
        _reject(f"{name} has {len(value)} characters; at most {limit} bytes are allowed")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        _reject(f"{name} is not valid Unicode: it has a lone surrogate")
    if size > limit:
        _reject(f"{name} has {size} bytes; at most {limit} are allowed")
    return value


def _checked_choices(value: object) -> list[str]:
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MAX_CHOICES:
        _reject(f"choice must be a list of 1 to {MAX_CHOICES} texts")
    total = 0
    for text in value:
        total += len(_check_text("choice", text))
        if not text:
            _reject("choice has an empty text")
    if total > MAX_GRAMMAR_BYTES:
        _reject(f"choice has {total} characters in all; at most {MAX_GRAMMAR_BYTES} are allowed")
    return list(value)


def _schema_text(value: object) -> str:
    """A schema as compact JSON text. Checks that it is JSON and not deeper than MAX_NESTING."""
    try:
        if isinstance(value, str):
            value = json.loads(_check_text("json", value, may_be_empty=False), parse_constant=_no_constant)
        if not isinstance(value, dict | bool):
            _reject("json must be a JSON schema: an object, or the text of one")
        if value is True:  # the same schema as an object, which the library requires
            value = {}
        check_json_size(value)
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        _reject(f"json nests deeper than {MAX_NESTING} levels")
    except json.JSONDecodeError as e:
        _reject(f"json is not valid JSON: {e.msg} at line {e.lineno}, column {e.colno}")
    except (TypeError, ValueError) as e:
        if isinstance(e, RequestError):
            raise
        _reject(f"json cannot be written as JSON: {str(e)[:100]}")
    return _check_text("json", text)


def _structural_tag_text(value: object) -> str:
    """A structural tag as JSON text. Checks that each structure begins with a trigger."""
    if isinstance(value, str):
        try:
            value = json.loads(_check_text("structural_tag", value), parse_constant=_no_constant)
        except (ValueError, RecursionError) as e:
            if isinstance(e, RequestError):
                raise
            _reject("structural_tag is not valid JSON")
    fields = value if isinstance(value, dict) else {}
    structures, triggers, special = map(fields.get, ("structures", "triggers", "special_tokens"))
    if not isinstance(structures, list) or not 0 < len(structures) <= MAX_TAGS:
        _reject(f"structural_tag needs a list of 1 to {MAX_TAGS} structures")
    if isinstance(triggers, list) and len(triggers) > MAX_TAGS:  # before each structure is compared with each trigger
        _reject(f"structural_tag may have {MAX_TAGS} triggers; found {len(triggers)}")
    if not _are_texts(triggers) or "" in triggers:
        _reject("structural_tag needs a list of triggers, which are texts")
    tags = _checked_structures(structures, triggers)
    if special is not None and (not _are_texts(special) or "" in special):
        _reject("structural_tag: special_tokens must be a list of texts")
    described = {
        "structures": tags,
        "triggers": triggers,
        **({"special_tokens": special[:MAX_TAGS]} if special else {}),
    }
    text = json.dumps(described, ensure_ascii=False, separators=(",", ":"))
    return _check_text("structural_tag", text)


def _are_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _checked_structures(structures: list[Any], triggers: list[str]) -> list[dict[str, Any]]:
    """The structures of a structural tag, with the fields that are read."""
    tags = []
    size = 0
    for i, tag in enumerate(structures):
        begin, end, schema = map(tag.get, ("begin", "end", "schema")) if isinstance(tag, dict) else (None,) * 3
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
            _reject(f"structural_tag: structure {i} needs a begin, a schema (an object) and an end")
        if not any(begin.startswith(trigger) for trigger in triggers):
            _reject(f"structural_tag: structure {i} begins with none of the triggers")
        schema_text = _schema_text(schema)
        size += len(schema_text)
        if size > MAX_GRAMMAR_BYTES:  # before the next structure is parsed
            _reject(f"structural_tag has more than {MAX_GRAMMAR_BYTES} characters, which is the limit")
        style = {key: tag[key] for key in ("style", "separator") if isinstance(tag.get(key), str)}
        if style.get("style", "json") not in STRUCTURE_STYLES:
            _reject(f"structural_tag: the style of structure {i} must be one of {', '.join(STRUCTURE_STYLES)}")
        tags.append({"begin": begin, "schema": json.loads(schema_text), "end": end, **style})
    return tags


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def check_json_size(value: object) -> None:
    """Returns if a JSON value is within the limits. Visits no more of the value than the limits allow.

    Raises:
        RequestError: It is larger than MAX_GRAMMAR_BYTES or nested deeper than MAX_NESTING.
    """
    level = [value]
    size = 0
    for _ in range(MAX_NESTING):
        for parent in level:
            if isinstance(parent, dict):
                size += sum(len(key) for key in parent if isinstance(key, str))
            size += len(parent) if isinstance(parent, dict | list | tuple | str) else 1
            if size > MAX_GRAMMAR_BYTES:
                _reject(f"json is too large; at most {MAX_GRAMMAR_BYTES} bytes are allowed")
        level = [
            item
            for parent in level
            if isinstance(parent, dict | list | tuple)
            for item in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return
    _reject(f"json nests deeper than {MAX_NESTING} levels")
