"""What form a request wants its output to have, whichever of its fields says so."""

from __future__ import annotations

from dataclasses import dataclass

from mvllm.entrypoints.openai.protocol import GenerationRequest
from mvllm.entrypoints.parsers.tool_choice import ToolChoice
from mvllm.errors import RequestError
from mvllm.logging import get_logger
from mvllm.messages.structured_outputs import StructuredOutputsParams, as_structured_outputs, check_json_size
from mvllm.structured_output.response_format import parse_response_format

logger = get_logger(__name__)

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_warned_fields: set[str] = set()  # those of them that the log has heard of


@dataclass(frozen=True)
class OutputConstraint:
    """A form, and where it comes from.

    Attributes:
        params: What the engine is told.
        field: The field of the request that errors about it name.
    """

    params: StructuredOutputsParams
    field: str


def output_constraint(request: GenerationRequest, choice: ToolChoice | None = None) -> OutputConstraint | None:
    """The form that the output of a request must have; None where any text will do.

    Args:
        choice: What a chat request says about tools.

    Raises:
        RequestError: The form is not acceptable, or several fields ask for one.
    """
    forms = []
    if (wanted := parse_response_format(request.response_format)) is not None:
        forms.append(OutputConstraint(wanted, "response_format"))
    if (wanted := as_structured_outputs("structured_outputs", request.structured_outputs)) is not None:
        forms.append(OutputConstraint(wanted, "structured_outputs"))
    forms += _guided(request)
    if choice is not None and choice.is_constrained:
        forms.append(OutputConstraint(_tool_call_constraint(choice), "tools"))
    if len(forms) > 1:
        first, second = (form.field if form.field != "tools" else "tool_choice" for form in forms[:2])
        raise RequestError(
            f"{first} and {second} each ask for a form of the output; send one of them.", parameter=second
        )
    if forms and choice is not None and choice.mode == "auto":
        raise RequestError(
            f"{forms[0].field} leaves no way to call the tools: the whole output has its form. Send tool_choice "
            "'none', or leave one of the two out.",
            parameter=forms[0].field,
        )
    return forms[0] if forms else None


def _guided(request: GenerationRequest) -> list[OutputConstraint]:
    """What the fields of before `structured_outputs` ask for."""
    forms = []
    for field, kind in _GUIDED.items():
        value = getattr(request, field)
        if value is None:
            continue
        if field not in _warned_fields:
            _warned_fields.add(field)
            logger.warning(
                '%s in requests is deprecated: send structured_outputs {"%s": ...}. This is said once.', field, kind
            )
        try:
            forms.append(OutputConstraint(StructuredOutputsParams(**{kind: value}), field))
        except RequestError as e:
            raise RequestError(str(e), parameter=field) from e
    return forms


def _tool_call_constraint(choice: ToolChoice) -> StructuredOutputsParams:
    try:
        check_json_size(choice.tools)  # before a schema of all of them is made
        return StructuredOutputsParams(json=choice.schema())
    except RequestError as e:
        raise RequestError(f"The parameters of the tools: {e}", parameter="tools") from e
