"""The structured output that a request asks for, in any of several fields."""

from __future__ import annotations

from dataclasses import dataclass

from mvllm.entrypoints.openai.protocol import GenerationRequest
from mvllm.entrypoints.parsers.interface import ToolParser
from mvllm.entrypoints.parsers.tool_choice import ToolChoice
from mvllm.errors import RequestError
from mvllm.logging import get_logger
from mvllm.messages.structured_outputs import (
    StructuredOutputsParams,
    as_structured_outputs,
    check_json_size,
)
from mvllm.structured_output.response_format import parse_response_format

logger = get_logger(__name__)

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_OTHER_NAMES = {"json_schema": "json", "grammar": "grammar", "regex": "regex", "ebnf": "grammar"}
"""Fields of llama.cpp and SGLang, with the corresponding fields of structured_outputs."""
_warned_fields: set[str] = set()  # deprecated fields that have been logged


@dataclass(frozen=True)
class OutputConstraint:
    """A constraint of the output and its field.

    Attributes:
        params: The constraint, for SamplingParams.
        field: The field of the request, for error messages.
    """

    params: StructuredOutputsParams
    field: str


def output_constraint(
    request: GenerationRequest, choice: ToolChoice | None = None, tool_parser: type[ToolParser] | None = None
) -> OutputConstraint | None:
    """The constraint of a request's output; None for free text.

    With tool_choice `auto` the only constraint is that of strict functions' arguments: the output stays free text.

    Args:
        choice: The tools and the tool choice of a chat request.
        tool_parser: The parser of the model's calls.

    Raises:
        RequestError: The constraint is not valid, or several fields have one.
    """
    constraints = []
    if (params := parse_response_format(request.response_format)) is not None:
        constraints.append(OutputConstraint(params, "response_format"))
    if (params := as_structured_outputs("structured_outputs", request.structured_outputs)) is not None:
        constraints.append(OutputConstraint(params, "structured_outputs"))
    constraints += _guided(request)
    if choice is not None and choice.is_constrained:
        constraints.append(OutputConstraint(_tool_call_constraint(choice), "tools"))
    if len(constraints) > 1:
        first, second = (each.field if each.field != "tools" else "tool_choice" for each in constraints[:2])
        raise RequestError(f"{first} and {second} both constrain the output; send only one of them.", parameter=second)
    if constraints and choice is not None and choice.mode == "auto":
        raise RequestError(
            f"{constraints[0].field} constrains the whole output, so tools cannot be called. Send tool_choice 'none', "
            "or only one of the two.",
            parameter=constraints[0].field,
        )
    if choice is not None and tool_parser is not None and not constraints:
        return _strict_calls_constraint(choice, tool_parser)
    return constraints[0] if constraints else None


def _guided(request: GenerationRequest) -> list[OutputConstraint]:
    """The constraints of the deprecated `guided_*` fields, and of the fields of other engines."""
    constraints = []
    for field, kind in (_GUIDED | _OTHER_NAMES).items():
        value = getattr(request, field)
        if value is None or (value == "" and field in _OTHER_NAMES):
            continue
        if field in _GUIDED and field not in _warned_fields:
            _warned_fields.add(field)
            logger.warning(
                '%s in requests is deprecated: send structured_outputs {"%s": ...}. Logged once.', field, kind
            )
        try:
            constraints.append(OutputConstraint(StructuredOutputsParams(**{kind: value}), field))
        except RequestError as e:
            raise RequestError(str(e), parameter=field) from e
    return constraints


def _strict_calls_constraint(choice: ToolChoice, tool_parser: type[ToolParser]) -> OutputConstraint | None:
    """The constraint of the calls' arguments, if a function is strict; None for any other request."""
    if choice.mode != "auto":
        return None
    try:
        check_json_size(choice.tools)
        tag = choice.structural_tag(tool_parser(choice.tools))
        return None if tag is None else OutputConstraint(StructuredOutputsParams(structural_tag=tag), "tools")
    except RequestError as e:
        raise RequestError(f"The parameters of the tools: {e}", parameter="tools") from e


def _tool_call_constraint(choice: ToolChoice) -> StructuredOutputsParams:
    try:
        check_json_size(choice.tools)  # before their combined schema is made
        return StructuredOutputsParams(json=choice.schema())
    except RequestError as e:
        raise RequestError(f"The parameters of the tools: {e}", parameter="tools") from e
