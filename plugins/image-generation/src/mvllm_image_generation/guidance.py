"""Classifier-free guidance in the front end: the unconditional prompts of requests.

A guided request is a request pair: its companion has the unconditional prompt, and `combiner.GuidanceCombiner` combines
their logits in the worker.
"""

from __future__ import annotations

import msgspec

from mvllm.extension_api import RequestError, SamplingParams
from mvllm.extension_api.parameters import describe_value
from mvllm.extension_api.request_pairs import TEXT, PairContext, PairRequests


class GuidanceSettings(msgspec.Struct, array_like=True):
    """What a guided request tells the combiner.

    Attributes:
        scale: `SamplingParams.guidance_scale`.
    """

    scale: float


encode = msgspec.msgpack.encode
decode = msgspec.msgpack.Decoder(GuidanceSettings).decode


class Guidance(PairRequests):
    """The kind of pairs that `guidance_scale` asks for."""

    combiner = "guidance"
    parameter = "guidance_scale"
    prompt_parameter = "negative_prompt"

    def __init__(self, context: PairContext) -> None:
        super().__init__(context)
        self._model = context.config.model
        bos = self._model.hf_config.get("bos_token_id")
        is_token = type(bos) is int and 0 <= bos < self._model.vocab_size
        self._bos_token_id: int | None = bos if is_token else None

    def settings(self, params: SamplingParams) -> bytes:
        if params.guidance_scale is None:
            raise RequestError("request_pair is 'guidance', which needs guidance_scale.", parameter="guidance_scale")
        return encode(GuidanceSettings(params.guidance_scale))

    def shared_prompt(self, params: SamplingParams) -> list[int] | None:
        """The token ids of `negative_prompt`; None without one.

        Raises:
            RequestError: They are not valid, or it is a text and there is no tokenizer.
        """
        given = params.negative_prompt
        if given is None:
            return None
        try:
            return self.context.check_token_ids(self._encode(given) if isinstance(given, str) else given)
        except RequestError as e:
            raise RequestError(f"negative_prompt: {e}", parameter="negative_prompt") from e

    def _encode(self, text: str) -> list[int]:
        tokenizer, check_length = self.context.tokenizer, self.context.check_length
        if tokenizer is None:
            raise RequestError(
                "it is a text, but the engine was started with skip_tokenizer_init. Pass a list of token ids."
            )
        check_length(tokenizer.num_tokens_lower_bound(text), "at least ")
        (ids,) = tokenizer.encode_batch([text], check_length=lambda _, length: check_length(length, ""))
        if not ids:
            raise RequestError(f"it is empty: its text {describe_value(text)} gives no tokens.")
        return ids

    def prompt_for(self, params: SamplingParams, prompt_token_ids: list[int]) -> list[int]:
        """The unconditional prompt of a request without `negative_prompt`.

        Of text: the beginning-of-sequence token, or the last token of the prompt if the model has none. Of another
        space: the prompt with all tokens replaced by padding except those that begin a sequence or an output of the
        space; without a padding token, only tokens that begin something.

        Raises:
            RequestError: The space names no tokens that begin an output.
        """
        if params.token_space == TEXT:
            return prompt_token_ids[-1:] if self._bos_token_id is None else [self._bos_token_id]
        space = self._model.token_spaces[params.token_space]
        if not space.begin_token_ids:
            raise RequestError(
                f"The model {self._model.model} names no token that begins an output of the space {space.name!r}, so "
                "there is no unconditional prompt by default. Set negative_prompt (of Janus, 'boi_token_id' in "
                "generation_config.json names the token).",
                parameter="negative_prompt",
            )
        kept = {*space.begin_token_ids, *([] if self._bos_token_id is None else [self._bos_token_id])}
        if space.pad_token_id is None:
            return [token for token in prompt_token_ids if token in kept] or prompt_token_ids[-1:]
        return [token if token in kept else space.pad_token_id for token in prompt_token_ids]
