"""For packages with parameters of their own: checks of values, with the bounds and the errors of SamplingParams."""

from __future__ import annotations

from mvllm.messages.field_checks import Check as Check
from mvllm.messages.field_checks import boolean as boolean
from mvllm.messages.field_checks import describe_value as describe_value
from mvllm.messages.field_checks import integer as integer
from mvllm.messages.field_checks import reject as reject
from mvllm.messages.sampling_params import FIELD_CHECKS as FIELD_CHECKS

__all__ = ["FIELD_CHECKS", "Check", "boolean", "describe_value", "integer", "reject"]
