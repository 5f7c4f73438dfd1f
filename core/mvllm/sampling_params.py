"""Public names of the settings of a generation request."""

from mvllm.messages.beam_search_params import BeamSearchParams
from mvllm.messages.sampling_params import RequestOutputKind, SamplingParams
from mvllm.messages.structured_outputs import StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
