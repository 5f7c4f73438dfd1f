"""BeamSearchParams: the settings of `LLM.beam_search`."""

from __future__ import annotations

import msgspec

from mvllm.messages.named_parameters import NamedParameters
from mvllm.messages.sampling_params import SamplingParams


class BeamSearchParams(msgspec.Struct, kw_only=True, omit_defaults=True, metaclass=NamedParameters):
    """Settings of a beam search. Fields that SamplingParams also has have the same meaning and bounds.

    Attributes:
        beam_width: Number of beams, and of sequences in the result.
        max_tokens, min_tokens, ignore_eos, stop_token_ids, length_penalty, early_stopping: As in SamplingParams.
        temperature: 0 or 1, with the same effect: beam search does not sample.
        include_stop_str_in_output: Keep the text of the token that ends a sequence.
        logprobs: As in SamplingParams.
    """

    beam_width: int
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None

    def as_sampling_params(self) -> SamplingParams:
        """The same settings as SamplingParams.

        Raises:
            RequestError: A value is out of its range.
        """
        named = {name: getattr(self, name) for name in self.__struct_fields__}
        # The width is checked first, so that its error names beam_width.
        width = SamplingParams(use_beam_search=True, beam_width=self.beam_width).num_beams
        return SamplingParams(use_beam_search=True, n=width, **named)
