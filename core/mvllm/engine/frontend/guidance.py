"""Unconditional prompts of guided requests, and requests for other token spaces than text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mvllm.config.engine_config import EngineConfig
from mvllm.config.token_spaces import TokenSpace
from mvllm.engine.tokenizer.tokenizer import Tokenizer
from mvllm.errors import RequestError
from mvllm.messages.field_checks import describe_value, reject
from mvllm.messages.sampling_params import TEXT, SamplingParams


class GuidanceProcessor:
    """Checks the guidance and the token space of requests, and makes their unconditional prompts.

    Args:
        config: The engine's configuration.
        tokenizer: The model's tokenizer, if there is one.
        check_token_ids: Checks the token ids of a prompt, and returns them.
        check_length: Checks the number of tokens of a prompt, or a lower bound; its second argument says which.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        check_token_ids: Callable[[Sequence[int]], list[int]],
        check_length: Callable[[int, str], None],
    ) -> None:
        self._model = config.model
        self._has_drafts = config.speculative is not None
        self._tokenizer = tokenizer
        self._check_token_ids = check_token_ids
        self._check_length = check_length
        bos = config.model.hf_config.get("bos_token_id")
        is_token = type(bos) is int and 0 <= bos < config.model.vocab_size
        self._bos_token_id: int | None = bos if is_token else None

    def space_of(self, params: SamplingParams) -> TokenSpace | None:
        """The space that `params` names; None for text.

        Raises:
            RequestError: The model has no such space.
        """
        if params.token_space == TEXT:
            return None
        space = self._model.token_spaces.get(params.token_space)
        if space is None:
            names = ", ".join(repr(name) for name in (TEXT, *self._model.token_spaces))
            reject("token_space", params.token_space, f"one of the spaces of the model {self._model.model}: {names}")
        return space

    def check_params(self, params: SamplingParams) -> None:
        """Checks the two fields, and completes the parameters of a request for another space than text, in place.

        Raises:
            RequestError: The model or the engine does not support them, or another parameter excludes them.
        """
        if params.is_guided and self._has_drafts:
            raise RequestError(
                "guidance_scale cannot be combined with speculative decoding: draft tokens are verified without "
                "guidance. Start the engine without speculative_config.",
                parameter="guidance_scale",
            )
        space = self.space_of(params)
        if space is None:
            return
        if self._has_drafts:
            raise RequestError(
                f"token_space={space.name!r} cannot be combined with speculative decoding, which proposes text.",
                parameter="token_space",
            )
        for name in ("stop", "structured_outputs", "bad_words", "thinking_token_budget"):
            if getattr(params, name):
                reject(name, getattr(params, name), f"unset when token_space is {space.name!r}: it concerns text")
        params.ignore_eos = True
        params.detokenize = False
        if params.max_tokens is None:
            params.max_tokens = space.num_tokens

    def negative_token_ids(self, params: SamplingParams) -> list[int] | None:
        """The token ids of `negative_prompt`; None without one, or without guidance.

        Raises:
            RequestError: They are not valid, or it is a text and there is no tokenizer.
        """
        given = params.negative_prompt
        if given is None or not params.is_guided:
            return None
        try:
            return self._check_token_ids(self._encode(given) if isinstance(given, str) else given)
        except RequestError as e:
            raise RequestError(f"negative_prompt: {e}", parameter="negative_prompt") from e

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise RequestError(
                "it is a text, but the engine was started with skip_tokenizer_init. Pass a list of token ids."
            )
        self._check_length(self._tokenizer.num_tokens_lower_bound(text), "at least ")
        (ids,) = self._tokenizer.encode_batch([text], check_length=lambda _, length: self._check_length(length, ""))
        if not ids:
            raise RequestError(f"it is empty: its text {describe_value(text)} gives no tokens.")
        return ids

    def default_token_ids(self, params: SamplingParams, prompt_token_ids: list[int]) -> list[int]:
        """The unconditional prompt of a request without `negative_prompt`.

        Of text: the beginning-of-sequence token, or the last token of the prompt if the model has none. Of another
        space: the prompt with all tokens replaced by padding except those that begin a sequence or an output of the
        space; without a padding token, only tokens that begin something.

        Raises:
            RequestError: The space names no tokens that begin an output.
        """
        space = self.space_of(params)
        if space is None:
            return prompt_token_ids[-1:] if self._bos_token_id is None else [self._bos_token_id]
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
