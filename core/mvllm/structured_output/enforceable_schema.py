"""A JSON schema as the grammar library can enforce it, found by attempts.

The first attempt has the exact rewrites of `schema_rewriting`. Where the library refuses the result, its error says
which keyword is at fault; the next attempt is without it, until the schema compiles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from mvllm.structured_output import llguidance_library
from mvllm.structured_output.additional_properties import close_declared_objects
from mvllm.structured_output.schema_rewriting import SchemaRewriter
from mvllm.structured_output.vocabulary import one_line

_REMEDIES = (
    ("oneOf constraints", (("oneOf",),)),
    ("min/maxProperties", (("minProperties",), ("all minProperties",))),
    ("are not disjoint", (("patternProperties",),)),
    ("circular references", (("rewrites",), ("$ref",), ("allOf",), ("anyOf",))),
    ("intersection stack level", (("rewrites",), ("$ref",), ("allOf",), ("anyOf",))),
    ("regex", (("pattern",), ("patternProperties",), ("all patterns",))),
    ("lexer", (("pattern",), ("all patterns",))),
    ("", (("rewrites",),)),
)
"""By a part of the library's error: the keywords to remove in the next attempts, see SchemaRewriter."""

_MAX_ATTEMPTS = 8

FindError = Callable[[Any, str], str | None]


class EnforceableSchema:
    """A JSON schema, and the grammar that enforces it as far as the library can.

    Args:
        tokenizer: The library's tokenizer.
        schema: The schema; objects that declare properties are closed.
        options: The library's options of JSON schemas.
        find_error: Why a grammar cannot be used.

    Attributes:
        rewritten: The schema that is enforced.
        grammar: Of `compile`.
    """

    grammar: str = ""

    def __init__(self, tokenizer: Any, schema: Any, options: Mapping[str, Any], find_error: FindError) -> None:
        self._tokenizer = tokenizer
        self._closed = close_declared_objects(schema) if isinstance(schema, dict) else schema
        self._options = dict(options)
        self._find_error = find_error
        self._usable: dict[str, bool] = {}
        self._relaxed: frozenset[str] = frozenset()

    @property
    def relaxations(self) -> tuple[str, ...]:
        """What is not enforced."""
        return self._rewriting[1]

    @property
    def rewritten(self) -> Any:
        """The schema that is enforced.

        Raises:
            ValueError: A keyword of a strict schema cannot be enforced.
        """
        return self._rewriting[0]

    def compile(self) -> str | None:
        """Makes `grammar`, without the keywords that the library cannot enforce. Returns why there is none.

        Raises:
            ValueError: A keyword of a strict schema cannot be enforced.
        """
        error: str | None = None
        for _ in range(_MAX_ATTEMPTS):
            error = self._compile_once()
            more = None if error is None else self._next_remedy(error)
            if more is None:
                break
            self._relaxed |= more
            self.__dict__.pop("_rewriting", None)
        return error

    @cached_property
    def _rewriting(self) -> tuple[Any, tuple[str, ...]]:
        if not isinstance(self._closed, dict):
            return self._closed, ()
        rewriter = SchemaRewriter(self._closed, self._relaxed, self._is_usable_pattern)
        return rewriter.rewrite(), tuple(rewriter.relaxations)

    def _compile_once(self) -> str | None:
        text = json.dumps(self.rewritten)
        try:
            matcher = llguidance_library.load().LLMatcher
            self.grammar = matcher.grammar_from_json_schema(text, overrides=self._options)
            return self._find_error(self._tokenizer, self.grammar)
        except Exception as e:  # noqa: BLE001  (it is the result)
            return one_line(e) or type(e).__name__

    def _next_remedy(self, error: str) -> frozenset[str] | None:
        for words, remedies in _REMEDIES:
            if words in error:
                return next((frozenset(each) for each in remedies if not self._relaxed.issuperset(each)), None)
        return None

    def _is_usable_pattern(self, pattern: str) -> bool:
        if pattern not in self._usable:
            matcher = llguidance_library.load().LLMatcher
            try:
                grammar = matcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
                error = self._find_error(self._tokenizer, grammar)
            except Exception as e:  # noqa: BLE001  (it is the result)
                error = one_line(e)
            self._usable[pattern] = error is None or error == "no text can match it"
        return self._usable[pattern]
