"""What form a request wants its output to have, whichever of its fields says so."""

from __future__ import annotations

from dataclasses import dataclass

from mvllm.entrypoints.openai.protocol import GenerationRequest
from mvllm.entrypoints.parsers.tool_choice import ToolChoice
from mvllm.errors import RequestError
from mvllm.logging import get_logger
from mvllm.messages.structured_outputs import StructuredOutputsParams, as_structured_outputs, check_extent
from mvllm.structured_output.response_format import structured_outputs_of

logger = get_logger(__name__)

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_mentioned: set[str] = set()  # those of them that the log has heard of


@dataclass(frozen=True)
class OutputForm:
    """A form, and where it comes from.

    Attributes:
        params: What the engine is told.
        field: The field of the request that errors about it name.
    """

    params: StructuredOutputsParams
    field: str


def output_form(request: GenerationRequest, choice: ToolChoice | None = None) -> OutputForm | None:
    """The form that the output of a request must have; None where any text will do.

    Args:
        choice: What a chat request says about tools.

    Raises:
        RequestError: The form is not acceptable, or several fields ask for one.
    """
    forms = []
    if (wanted := structured_outputs_of(request.response_format)) is not None:
        forms.append(OutputForm(wanted, "response_format"))
    if (wanted := as_structured_outputs("structured_outputs", request.structured_outputs)) is not None:
        forms.append(OutputForm(wanted, "structured_outputs"))
    forms += _guided(request)
    if choice is not None and choice.is_constrained:
        forms.append(OutputForm(_form_of_calls(choice), "tools"))
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


def _guided(request: GenerationRequest) -> list[OutputForm]:
    """What the fields of before `structured_outputs` ask for."""
    forms = []
    for field, kind in _GUIDED.items():
        value = getattr(request, field)
        if value is None:
            continue
        if field not in _mentioned:
            _mentioned.add(field)
            logger.warning(
                '%s in requests is deprecated: send structured_outputs {"%s": ...}. This is said once.', field, kind
            )
        try:
            forms.append(OutputForm(StructuredOutputsParams(**{kind: value}), field))
        except RequestError as e:
            raise RequestError(str(e), parameter=field) from e
    return forms


def _form_of_calls(choice: ToolChoice) -> StructuredOutputsParams:
    try:
        check_extent(choice.tools)  # before a schema of all of them is made
        return StructuredOutputsParams(json=choice.schema())
    except RequestError as e:
        raise RequestError(f"The parameters of the tools: {e}", parameter="tools") from e
