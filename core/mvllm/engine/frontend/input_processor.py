"""Input processor: validates and tokenizes prompts, and converts them to EngineCoreRequests.

All entry points use it, so later code can rely on valid requests. No request is queued before all of them are checked.
"""

from __future__ import annotations

import copy
import difflib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mvllm.config.engine_config import EngineConfig
from mvllm.config.token_spaces import TokenSpace
from mvllm.engine.frontend.bad_words import bad_word_token_ids
from mvllm.engine.frontend.length_advice import has_models_length, longer_sequences
from mvllm.engine.frontend.prompt_items import (
    ITEM_KEYS,
    PreparedItems,
    PromptItems,
    check_item_keys,
    check_params_with_items,
    check_placed,
    expand_prompt_text,
    expand_token_ids,
    name_for_salt,
    place_items,
    refuse_truncation,
)
from mvllm.engine.frontend.request_checks import (
    as_token_id,
    check_arrival_time,
    check_cache_salt,
    check_generates,
    check_priority,
    check_request_id,
)
from mvllm.engine.frontend.request_pairs import PairContext, PairRequestsOfEngine, make_pair
from mvllm.engine.frontend.thinking_tags import fit_thinking_to_prompt, thinking_tokens_of
from mvllm.engine.frontend.token_spaces import complete_space_params, space_of
from mvllm.engine.tokenizer.tokenizer import Tokenizer, check_supports_grammars
from mvllm.errors import RequestError
from mvllm.messages.field_checks import describe_value
from mvllm.messages.inputs import ExpandedPrompt, PromptType
from mvllm.messages.lora import LoRARequest
from mvllm.messages.multimodal import MultiModalItem
from mvllm.messages.pooling_params import PoolingParams
from mvllm.messages.requests import EngineCoreRequest, RequestPair
from mvllm.messages.sampling_params import SamplingParams, validate_for_model
from mvllm.messages.thinking import DEFAULT_TAGS
from mvllm.multimodal.item_memory import ItemLease
from mvllm.multimodal.item_request import has_items
from mvllm.multimodal.processed_item import ProcessedItem
from mvllm.multimodal.processor_client import ProcessorClient
from mvllm.sampling.logits_processor import processor_classes, validate
from mvllm.structured_output.llguidance_library import check_available

KV_TRANSFER_PARAMS = "kv_transfer_params"
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "add_special_tokens", "cut_at", *ITEM_KEYS)
_UTF8_CHECK_CHARS = 1 << 20  # checked at a time, so that other threads can run in between
_MAX_TRUNCATED_TEXT_CHARS = 1 << 22  # limit for a text to truncate, which is tokenized as a whole


@dataclass(slots=True)
class ProcessedRequest:
    """A validated and tokenized request.

    Attributes:
        prompt: The prompt as text, if known.
        params: The validated parameters; `n` may be larger than 1.
        core: The request for the engine core; its `sampling_params` are `params`.
        space: The space of its output tokens; None for text.
        item_lease: The memory of its items; None without.
    """

    prompt: str | None
    params: SamplingParams
    core: EngineCoreRequest
    space: TokenSpace | None = None
    item_lease: ItemLease | None = None


@dataclass(slots=True)
class _Prompt:
    """The parts of a prompt; `token_ids` is None until the text is tokenized.

    Attributes:
        keep: Number of tokens to keep at the end; None for all.
        add_special_tokens: Whether the tokenizer adds its special tokens to the text.
        expanded: The text to tokenize, if it is not `text`: with cuts, or with its placeholders replaced.
        cut_at: Where it is cut.
        items: Items in the order of their places.
        placed: Items with their spans.
    """

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None
    keep: int | None = None
    add_special_tokens: bool = True
    expanded: str | None = None
    cut_at: str | None = None
    items: Sequence[ProcessedItem] = ()
    placed: list[MultiModalItem] = field(default_factory=list)


class InputProcessor:
    """Checks and tokenizes the requests of one engine.

    Args:
        config: The engine's configuration in use.
        tokenizer: The model's tokenizer. With None, text and stop strings are rejected, and outputs have no text.
        runs_functions: The model runs in this process, and requests may have functions as logits processors.
        item_client: Prepares images, audio and videos; by default a new one.
    """

    num_reserved_tokens = 1
    """Tokens of the context that a prompt must leave free."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        *,
        runs_functions: bool = False,
        item_client: ProcessorClient | None = None,
    ) -> None:
        self._model = config.model
        self.items = PromptItems(config, item_client or ProcessorClient(config.model, config.multimodal))
        self._runs_functions = runs_functions
        self._tokenizer = tokenizer
        self._uses_priorities = config.scheduler.policy == "priority"
        self._num_token_ids = config.model.num_token_ids
        self._eos_token_ids = self._end_token_ids()
        self._processor_classes = processor_classes(config.logits_processors)
        self._has_drafts = config.speculative is not None
        self._pairs = PairRequestsOfEngine(PairContext(config, tokenizer, self._check_token_ids, self._check_length))

    def default_params(self) -> SamplingParams:
        """The sampling parameters of the model's generation_config.json."""
        return SamplingParams(**self._model.generation_defaults)

    def process(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
    ) -> ProcessedRequest:
        """Processes one request; see `process_batch`."""
        return self.process_batch(
            [request_id],
            [prompt],
            [params],
            priorities=[priority],
            arrival_time=arrival_time,
            lora_requests=[lora_request],
        )[0]

    def process_batch(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[PromptType],
        params: Sequence[SamplingParams | PoolingParams | None],
        *,
        priorities: Sequence[int] | None = None,
        arrival_time: float | None = None,
        lora_requests: Sequence[LoRARequest | None] | None = None,
        items: Sequence[PreparedItems] | None = None,
    ) -> list[ProcessedRequest]:
        """Checks all requests and tokenizes their texts together. The arguments are parallel sequences.

        Args:
            params: None takes the model's defaults.
            priorities: Lower is served earlier; without effect unless the policy is `priority`.
            arrival_time: Monotonic seconds; now by default.
            lora_requests: The LoRA adapter of each request, or None; LoRARequestValidator checks fields and files.
            items: The prepared items of each prompt; None has them prepared here, which may take long.

        Raises:
            RequestError: One of them is invalid. With several requests, the message has the position of that one.
        """
        arrival = time.monotonic() if arrival_time is None else check_arrival_time(arrival_time)
        parts = [
            self._check_for_prompt(i, prompts, self._parse_prompt, prompt, params[i])
            for i, prompt in enumerate(prompts)
        ]
        prepared = self.items.prepare_all(prompts, self._check_for_prompt) if items is None else items
        for i, part in enumerate(parts):
            part.items = prepared[i]
            if part.items:
                self._check_for_prompt(i, prompts, self._expand, part)
        self._tokenize(parts)
        processed = []
        checked: dict[int, SamplingParams] = {}  # params shared by many prompts are checked once
        shared: dict[int, list[int] | None] = {}  # prompts of companions
        for i, part in enumerate(parts):
            chosen = params[i]
            if chosen is None:
                validated = self._check_params(self.default_params())
            elif id(chosen) in checked:
                validated = copy.copy(checked[id(chosen)])
            else:
                validated = checked[id(chosen)] = self._check_for_prompt(i, prompts, self._check_params, chosen)
            pair, kind = None, self._pairs.kind_of(validated)
            if kind is not None:
                if id(chosen) not in shared:
                    shared[id(chosen)] = self._check_for_prompt(i, prompts, kind.shared_prompt, validated)
                arguments = kind, validated, part.token_ids or [], shared[id(chosen)]
                pair = self._check_for_prompt(i, prompts, make_pair, *arguments)
            if part.placed:
                self._check_for_prompt(i, prompts, check_params_with_items, validated, part.placed, pair)
            validated.negative_prompt = None  # each sequence is sent with its token ids
            validated = self._check_for_prompt(i, prompts, self._fit_params_to_prompt, validated, part, pair)
            validated, kv_transfer_params = _take_kv_transfer_params(validated)
            core = EngineCoreRequest(
                request_id=check_request_id(request_ids[i]),
                prompt_token_ids=part.token_ids or [],
                sampling_params=validated,
                eos_token_ids=self._eos_token_ids,
                arrival_time=arrival,
                priority=check_priority(priorities[i], is_used=self._uses_priorities) if priorities is not None else 0,
                cache_salt=part.cache_salt,
                lora_request=None if lora_requests is None else self._check_lora_request(lora_requests[i]),
                pair=pair,
                kv_transfer_params=kv_transfer_params,
                items=name_for_salt(part.placed, part.cache_salt),
            )
            processed.append(ProcessedRequest(part.text, validated, core, space_of(self._model, validated)))
        return processed

    # --- prompts

    def expand(self, prompt: PromptType, items: PreparedItems) -> ExpandedPrompt:
        """A prompt with its items in their places, tokenized. `process` takes it without preparing them again.

        Args:
            items: The prepared items of the prompt.

        Raises:
            RequestError: The prompt is not valid, or its placeholders are not those of the items.
        """
        part = self._parse_prompt(prompt, None)
        part.items = items
        if items:
            self._expand(part)
        self._tokenize([part])
        found = ExpandedPrompt(prompt_token_ids=part.token_ids or [], multi_modal_items=part.placed)
        return found if part.text is None else {**found, "prompt": part.text}

    def check_text(self, text: str) -> str:
        """Returns `text`.

        Raises:
            RequestError: There is no tokenizer, or `text` cannot be encoded as UTF-8.
        """
        if self._tokenizer is None:
            raise RequestError(
                "The engine was started with skip_tokenizer_init, so it accepts token ids, not text. "
                "Pass {'prompt_token_ids': [...]}.",
                parameter="prompt",
            )
        for start in range(0, len(text), _UTF8_CHECK_CHARS):
            try:
                text[start : start + _UTF8_CHECK_CHARS].encode()
            except UnicodeEncodeError as e:
                position = start + e.start
                raise RequestError(
                    f"The prompt is not valid Unicode: character {position} is a lone surrogate "
                    f"U+{ord(text[position]):04X}. Text that was read from bytes must be UTF-8.",
                    parameter="prompt",
                ) from None
        return text

    def _parse_prompt(self, prompt: PromptType, params: SamplingParams | PoolingParams | None) -> _Prompt:
        keep = self._num_tokens_to_keep(params)
        if isinstance(prompt, str):
            return _Prompt(self.check_text(prompt), None, None, keep)
        if isinstance(prompt, Mapping):
            return self._parse_prompt_dict(prompt, keep)
        if _is_token_sequence(prompt):
            return _Prompt(None, self._check_token_ids(prompt, keep))
        raise RequestError(
            "A prompt is a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}; "
            f"found {describe_value(prompt)}.",
            parameter="prompt",
        )

    def _num_tokens_to_keep(self, params: SamplingParams | PoolingParams | None) -> int | None:
        """Tokens to keep at the end of a prompt, at most as many as fit in the context; None for no truncation."""
        requested = getattr(params, "truncate_prompt_tokens", None)
        if requested is None:
            return None
        limit = self._model.max_model_len
        if requested > limit:
            raise RequestError(
                f"truncate_prompt_tokens must be an integer from 1 to {limit}, the model's context (max_model_len), or "
                f"-1; got {describe_value(requested)}",
                parameter="truncate_prompt_tokens",
            )
        most = limit - self.num_reserved_tokens
        return most if requested == -1 else min(requested, most)

    def _parse_prompt_dict(self, prompt: Mapping[str, Any], keep: int | None) -> _Prompt:
        for key in prompt:
            if key not in _PROMPT_KEYS:
                near = difflib.get_close_matches(str(key), _PROMPT_KEYS, n=1)
                meant = f" Did you mean {near[0]!r}?" if near else ""
                raise RequestError(
                    f"A prompt dict has the keys {', '.join(_PROMPT_KEYS)}; found {str(key)[:40]!r}.{meant}",
                    parameter="prompt",
                )
        salt = check_cache_salt(prompt.get("cache_salt"))
        check_item_keys(prompt)
        if prompt.get("prompt_embeds") is not None:
            if keep is not None:
                refuse_truncation()
            placed = self.items.read_embeds(prompt["prompt_embeds"], self._check_length)
            return _Prompt(None, [0] * placed[0].span.length, salt, placed=placed)
        expanded = prompt.get("multi_modal_items")
        special = prompt.get("add_special_tokens") is not False
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"'prompt' must be a text; found {describe_value(text)}.", parameter="prompt")
        if ids is not None:
            if not _is_token_sequence(ids):
                raise RequestError(
                    f"'prompt_token_ids' must be a list of token ids; found {describe_value(ids)}.", parameter="prompt"
                )
            if (expanded or has_items(prompt)) and keep is not None:
                refuse_truncation()
            return _Prompt(text, self._check_token_ids(ids, keep), salt, placed=check_placed(expanded or [], len(ids)))
        if text is None:
            raise RequestError("A prompt dict needs 'prompt' or 'prompt_token_ids'; found neither.", parameter="prompt")
        if (cut_at := prompt.get("cut_at")) is None:
            return _Prompt(self.check_text(text), None, salt, keep, special)
        if not isinstance(cut_at, str) or not cut_at or keep is not None:
            raise RequestError("cut_at must be a text, and needs no truncate_prompt_tokens.", parameter="prompt")
        self.check_text(text)
        return _Prompt(text.replace(cut_at, ""), None, salt, None, special, expanded=text, cut_at=cut_at)

    def _check_token_ids(self, ids: Sequence[int], keep: int | None = None) -> list[int]:
        if not len(ids):
            raise RequestError("The prompt is empty: it has no token ids.", parameter="prompt")
        if keep is not None:
            ids = ids[-keep:]
        self._check_length(len(ids))  # before copying
        values: list[int] = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if set(map(type, values)) != {int}:
            values = [as_token_id(value, i) for i, value in enumerate(values)]
        if min(values) < 0 or max(values) >= self._num_token_ids:
            i, bad = next((i, v) for i, v in enumerate(values) if not 0 <= v < self._num_token_ids)
            raise RequestError(
                f"Token ids must be from 0 to {self._num_token_ids - 1}, the model's vocabulary; "
                f"found {describe_value(bad)} at position {i} of the prompt.",
                parameter="prompt",
            )
        return values

    def _check_length(self, length: int, how: str = "") -> None:
        limit = self._model.max_model_len
        if length > limit - self.num_reserved_tokens:
            what = "prompt and output together" if self.num_reserved_tokens else "a prompt"
            and_one = ", and at least one token is to be generated" if self.num_reserved_tokens else ""
            can_grow = length > limit and not has_models_length(self._model)
            larger = f", or start the engine with {longer_sequences(self._model)}" if can_grow else ""
            raise RequestError(
                f"The prompt has {how}{length} tokens, but {what} may have {limit} (max_model_len){and_one}. "
                f"Shorten the prompt{larger}.",
                parameter="prompt",
            )

    def _expand(self, part: _Prompt) -> None:
        """Replaces the placeholders of a prompt with items."""
        if part.keep is not None:
            refuse_truncation()
        if part.token_ids is None:
            part.expanded, part.items = expand_prompt_text(part.expanded or part.text or "", part.items)
            return
        ids, part.items = expand_token_ids(part.token_ids, part.items)
        part.token_ids = self._check_token_ids(ids)
        part.placed = place_items(part.token_ids, part.items)

    def _tokenize(self, parts: Sequence[_Prompt]) -> None:
        """Sets the token ids of prompts with text."""
        waiting = [(i, part) for i, part in enumerate(parts) if part.token_ids is None]
        if not waiting:
            return
        assert self._tokenizer is not None
        texts = [part.expanded or part.text or "" for _, part in waiting]

        def check_length(at: int, length: int) -> None:
            if waiting[at][1].keep is None:
                self._check_for_prompt(waiting[at][0], parts, self._check_length, length)

        for at, text in enumerate(texts):  # reject texts that are much too long without tokenizing them
            if waiting[at][1].keep is None:
                cut_at = waiting[at][1].cut_at
                pieces = [text] if cut_at is None else _pieces(text, cut_at)
                fewest = max(len(pieces), self._tokenizer.num_tokens_lower_bound("".join(pieces)))
                self._check_for_prompt(waiting[at][0], parts, self._check_length, fewest, "at least ")
            else:
                self._check_for_prompt(waiting[at][0], parts, check_num_chars_to_truncate, len(text))
        for (i, part), ids in zip(waiting, self._encode(waiting, texts, check_length), strict=True):
            if not ids:
                raise RequestError(
                    f"{_prompt_label(i, parts)}The prompt is empty: its text {describe_value(part.text)} gives "
                    "no tokens.",
                    parameter="prompt",
                )
            part.token_ids = self._check_for_prompt(i, parts, self._check_token_ids, ids, part.keep)
            if part.items:
                part.placed = self._check_for_prompt(i, parts, place_items, part.token_ids, part.items)

    def _encode(
        self, waiting: Sequence[tuple[int, _Prompt]], texts: Sequence[str], check_length: Callable[[int, int], None]
    ) -> list[list[int]]:
        """The token ids of texts, those with and those without special tokens together."""
        assert self._tokenizer is not None
        encoded: dict[int, list[int]] = {}
        for special in (True, False):
            places = [
                at for at, (_, part) in enumerate(waiting) if part.add_special_tokens is special and part.cut_at is None
            ]
            if not places:
                continue
            found = self._tokenizer.encode_batch(
                [texts[at] for at in places],
                add_special_tokens=special,
                check_length=lambda at, length, places=places: check_length(places[at], length),  # type: ignore[misc]
            )
            encoded.update(zip(places, found, strict=True))
        for at, (_, part) in enumerate(waiting):
            if part.cut_at is not None:
                encoded[at] = self._tokenizer.encode_pieces(
                    _pieces(texts[at], part.cut_at), add_special_tokens=part.add_special_tokens
                )
                check_length(at, len(encoded[at]))
        return [encoded[at] for at in range(len(texts))]

    # --- settings

    def _check_params(self, params: SamplingParams | PoolingParams) -> SamplingParams:
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params must be SamplingParams; found {describe_value(params)}.", parameter="sampling_params"
            )
        check_generates(self._model)
        if self._tokenizer is None and params.stop:
            raise RequestError(
                "Stop strings need a tokenizer, but the engine was started with skip_tokenizer_init. "
                "Pass stop_token_ids instead of stop.",
                parameter="stop",
            )
        if params.structured_outputs is not None:
            check_available()
            check_supports_grammars(self._tokenizer)
        if params.logits_processors and not self._runs_functions:
            raise RequestError(
                "logits_processors has functions, which run only where the model does: in an LLM with one device and "
                "without engine_core_process. For other engines write a class, and name it in the engine's setting "
                "logits_processors.",
                parameter="logits_processors",
            )
        if params.is_ranked and self._model.logprobs_mode != "raw_logprobs":
            name = "use_beam_search" if params.use_beam_search else "best_of"
            raise RequestError(
                f"{name} ranks outputs by the model's log-probabilities, but the engine was started with "
                f"logprobs_mode={self._model.logprobs_mode!r}. Start it with 'raw_logprobs'.",
                parameter=name,
            )
        if self._processor_classes:
            validate(self._processor_classes, params)
        params = params.clone()  # validates again, and the caller may change its own copy
        self._pairs.kind_of(params)
        complete_space_params(self._model, params, has_drafts=self._has_drafts)
        if params.bad_words:  # the replacement checks the limits of both together
            ids = [*(params.bad_words_token_ids or ()), *self._bad_words(params.bad_words)]
            params = msgspec.structs.replace(params, bad_words_token_ids=ids)
        if params.thinking_token_budget is not None and params.thinking_tokens is None:
            params = self._with_thinking_tokens(params)
        return params

    def _with_thinking_tokens(self, params: SamplingParams) -> SamplingParams:
        if self._tokenizer is None:
            raise RequestError(
                "thinking_token_budget needs a tokenizer, but the engine was started with skip_tokenizer_init. "
                "Pass thinking_tokens, too.",
                parameter="thinking_token_budget",
            )
        tokens = thinking_tokens_of(params.thinking_tags or DEFAULT_TAGS, self._tokenizer)
        return msgspec.structs.replace(params, thinking_tokens=tokens)

    def _fit_params_to_prompt(
        self, params: SamplingParams, part: _Prompt, pair: RequestPair | None = None
    ) -> SamplingParams:
        params = fit_thinking_to_prompt(params, part.text, part.token_ids or (), self._tokenizer)
        return validate_for_model(
            params,
            vocab_size=self._num_token_ids,
            max_model_len=self._model.max_model_len,
            max_logprobs=self._model.max_logprobs,
            prompt_len=max(len(part.token_ids or ()), 0 if pair is None else len(pair.prompt_token_ids)),
        )

    def _check_lora_request(self, request: LoRARequest | None) -> LoRARequest | None:
        if request is not None and not isinstance(request, LoRARequest):
            raise RequestError(
                "lora_request must be a LoRARequest(lora_name, lora_int_id, lora_path); found "
                f"{describe_value(request)}.",
                parameter="lora_request",
            )
        return request

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        if self._tokenizer is None:
            raise RequestError(
                "Bad words need a tokenizer, but the engine was started with skip_tokenizer_init. "
                "Pass bad_words_token_ids instead of bad_words.",
                parameter="bad_words",
            )
        return bad_word_token_ids(words, self._tokenizer)

    def _end_token_ids(self) -> list[int]:
        ids = list(self._model.eos_token_ids)
        eos = self._tokenizer.eos_token_id if self._tokenizer is not None else None
        if eos is not None and eos not in ids and 0 <= eos < self._model.vocab_size:
            ids.append(eos)
        return ids

    @staticmethod
    def _check_for_prompt(i: int, prompts: Sequence[Any], check: Any, *args: Any) -> Any:
        """Calls `check(*args)`. With several requests, adds the position to its RequestError."""
        try:
            return check(*args)
        except RequestError as e:
            if len(prompts) == 1:
                raise
            raise RequestError(f"{_prompt_label(i, prompts)}{e}", parameter=e.parameter) from e


def check_num_chars_to_truncate(num_chars: int) -> None:
    """Checks the length of a text that will be truncated after tokenization.

    Raises:
        RequestError: It is too long to be tokenized as a whole.
    """
    if num_chars > _MAX_TRUNCATED_TEXT_CHARS:
        raise RequestError(
            f"The prompt has {num_chars} characters, but a text with truncate_prompt_tokens may have "
            f"{_MAX_TRUNCATED_TEXT_CHARS}. Shorten the prompt.",
            parameter="prompt",
        )


def _pieces(text: str, cut_at: str) -> list[str]:
    return [piece for piece in text.split(cut_at) if piece] or [""]


def _prompt_label(i: int, prompts: Sequence[Any]) -> str:
    return f"Prompt {i} of {len(prompts)}: " if len(prompts) > 1 else ""


def _is_token_sequence(value: object) -> bool:
    if isinstance(value, list | tuple | range):
        return True
    return getattr(value, "ndim", None) == 1 and hasattr(value, "tolist")  # an array of NumPy, torch, ...


def _take_kv_transfer_params(params: SamplingParams) -> tuple[SamplingParams, dict[str, Any] | None]:
    """Parameters without `extra_args["kv_transfer_params"]`, and these. Workers do not need them."""
    if not params.extra_args or KV_TRANSFER_PARAMS not in params.extra_args:
        return params, None
    extra_args = dict(params.extra_args)
    given = extra_args.pop(KV_TRANSFER_PARAMS)
    if given is not None and not isinstance(given, dict):
        raise RequestError(
            f"{KV_TRANSFER_PARAMS} must be an object; found {describe_value(given)}.", parameter=KV_TRANSFER_PARAMS
        )
    params = copy.copy(params)  # may be shared by several prompts
    params.extra_args = extra_args or None
    return params, given or None
