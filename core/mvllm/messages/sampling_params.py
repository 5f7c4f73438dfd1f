"""Sampling settings of one request, and the checks of their values.

Bounds that need no model are checked whenever a `SamplingParams` is made: built by a user, decoded from a message, or
copied with changes. Bounds that depend on the model and the prompt are checked by `validate_for_model` in the input
processor. Both raise a `RequestError` that names the field, its allowed range and the value found.

Most fields hold their defaults, so a check starts with one identity comparison per field.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from mvllm.errors import RequestError
from mvllm.messages import sampling_param_checks as checks
from mvllm.messages.field_checks import (
    INT64_MAX,
    INT64_MIN,
    LARGEST_FLOAT,
    Check,
    as_int,
    boolean,
    integer,
    number,
    reject,
)
from mvllm.messages.named_parameters import NamedParameters
from mvllm.messages.structured_outputs import StructuredOutputsParams, as_structured_outputs
from mvllm.messages.thinking import ThinkingTokens, as_thinking_tokens, check_thinking_tags

TEXT = "text"
"""The token space of requests that do not name one: every token of the vocabulary."""

MAX_N = 128
"""Sequences per prompt. Each of them uses a row and KV blocks, so the number per request is limited."""

MAX_ENTRIES = 1 << 20
"""Entries in the sampling parameters of one HTTP request (`SamplingParams.num_entries`), counted once per sequence:
the parameters of each sequence are checked and sent separately."""

MAX_BEAM_WIDTH = 32
"""Limited because the whole sequence of each beam is sent to the engine core for each of its tokens."""

MAX_LENGTH_PENALTY = 10.0
"""Absolute value; lengths are raised to this power."""


class RequestOutputKind(enum.IntEnum):
    """Whether an output contains everything so far, only what is new, or is returned only at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, metaclass=NamedParameters):
    """Sampling settings of one request. Names and defaults are those of vLLM.

    Attributes:
        n: Number of sequences to generate from the prompt, 1 to 128; 1 when temperature is 0, as all would be equal.
        temperature: Finite and >= 0; 0 takes the most probable token (greedy), between 0 and 0.01 counts as 0.01.
        top_p: In (0, 1]: keep the smallest set of most probable tokens whose probability reaches this.
        top_k: Keep this many most probable tokens; 0 or -1 keeps all. Tokens tied with the last one are kept, too.
        min_p: In [0, 1]: drop tokens less probable than this fraction of the most probable one.
        presence_penalty: In [-2, 2], subtracted once from the logit of each token generated so far.
        frequency_penalty: In [-2, 2], subtracted once per occurrence among the generated tokens.
        repetition_penalty: > 0; divides positive and multiplies negative logits of tokens in prompt or output.
        seed: A signed 64-bit integer; makes the request's samples reproducible whatever else is in the batch. -1 means
            None.
        stop: Text or texts that end the output, none empty; stored as a list. Needs `detokenize`.
        stop_token_ids: Tokens that end the output.
        include_stop_str_in_output: Keep the stop text in the output.
        ignore_eos: Continue after the end-of-sequence token.
        max_tokens: Tokens to generate at most; None means as many as the context holds. With 0 the prompt is computed,
            for `prompt_logprobs` or the prefix cache, and the output is empty.
        min_tokens: No end-of-sequence token (unless `ignore_eos`) and no stop token before this many tokens.
        logprobs: Return the log-probabilities of the sampled token and of this many most probable ones; -1 for all.
        prompt_logprobs: Likewise for each prompt token. Such a request does not read the prefix cache.
        flat_logprobs: Return both as `FlatLogprobs`, a few long lists, instead of a dict for each token.
        detokenize: Turn the output into text.
        skip_special_tokens: Leave special tokens out of the text.
        spaces_between_special_tokens: Put spaces between special tokens in the text. No effect with tokenizers of the
            library `tokenizers`.
        output_kind: What each output of the engine contains.
        structured_outputs: A constraint on the text, such as a JSON schema. The output ends as soon as the constraint
            allows no further token. Tokens that end the output are allowed only where the text is complete, and before
            `min_tokens` only if no other token is allowed.
        best_of: Generate this many sequences, `n` to 128, and return the best `n` by the sum of their tokens'
            log-probabilities, best first. None means `n`. With more than `n`, there is no output before the end.
        logit_bias: Token id to the bias added to its logit, clamped to [-100, 100]; before penalties and temperature.
        allowed_token_ids: Only these tokens can be sampled, also instead of tokens that end the sequence.
        bad_words: Texts that must not occur. Each is tokenized as within a text and as after a space; its
            last token cannot be sampled after its other tokens, whether these are in the prompt or in the output.
        bad_words_token_ids: The same as lists of token ids. The engine adds the token ids of `bad_words`.
        truncate_prompt_tokens: Keep only the last tokens of the prompt, this many; -1 as many as the context holds.
        use_beam_search: Keep the `beam_width` best sequences at each position instead of sampling one, and return the
            best `n` finished ones by score: the sum of the log-probabilities of their tokens, divided by
            `length ** length_penalty`. There is no output before the end.
        beam_width: 1 to 32, at least `n`; by default `best_of`, or else `n`.
        length_penalty: From -10 to 10; above 0 it favours long sequences.
        early_stopping: When beam search ends before `max_tokens`. True: when `beam_width` sequences have finished.
            False: when, in addition, no running beam has a better score at its present length than the worst of these.
            "never": when no running beam can reach a better score at any length.
        extra_args: Arguments for plugins such as logits processors: names to JSON values.
        thinking_token_budget: Most tokens of the model's thoughts (its reasoning). After so many the end of the
            thoughts is generated in place of what the model would sample. Thoughts begin where the prompt ends with
            the opening tag or within thoughts, or where the output begins with the tag; other outputs are not affected.
        thinking_tags: The texts that open and close the thoughts, by default in `LLM` those of the format that the chat
            template shows, and otherwise the `think` tags of Qwen3 and DeepSeek-R1. With an empty opening text the
            output begins within the thoughts. A third text is generated in place of the closing one when the budget is
            spent; it should contain that one. Further texts, such as the beginning of a tool call, end the thoughts
            without a closing tag.
        thinking_tokens: The same as token ids. The engine adds those of `thinking_tags`.
        logits_processors: Functions that change the logits before a token is sampled, `f(output_ids, logits)` or
            `f(prompt_ids, output_ids, logits)`, with lists of token ids and float32 [vocab]; each returns the new
            logits. Only for an `LLM` whose model runs in its own process.
        skip_reading_prefix_cache: Compute the whole prompt, also what the prefix cache holds.
        guidance_scale: Classifier-free guidance: tokens are sampled from `u + guidance_scale * (c - u)`. c are the
            logits behind the prompt and u those behind `negative_prompt`, each with the same output tokens. From 0 to
            1000; needs the package mvllm-image-generation. None or 1 samples from c alone, without the cost of u.
            Penalties, masks and filters apply to the combined logits, and `logprobs` are those of the guided
            distribution.
        negative_prompt: The unconditional prompt of guidance: a text, or token ids. None takes the model's: of text
            the beginning-of-sequence token, or the last token of the prompt if the model has none.
        token_space: The space of the output tokens: `text`, or one that the model declares, as `image`. In another
            space `max_tokens=None` means the length of one output, and end-of-sequence tokens do not occur.
        forced_token_ids: Positions in the output, from 0, to the token that is generated there in place of what the
            model would sample, also one of another space.

    Raises:
        RequestError: A value has the wrong type or lies outside its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    best_of: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool = False
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    extra_args: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    thinking_tags: list[str] | None = None
    thinking_tokens: ThinkingTokens | None = None
    logits_processors: list[Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    guidance_scale: float | None = None
    negative_prompt: str | list[int] | None = None
    token_space: str = TEXT
    forced_token_ids: dict[int, int] | None = None

    def __post_init__(self) -> None:
        for name, default, check in _CHECKS:
            value = getattr(self, name)
            if value is not default:
                setattr(self, name, check(name, value))
        self._check_combinations()

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the most probable one."""
        return self.temperature == 0.0

    @property
    def is_guided(self) -> bool:
        """Whether the logits of an unconditional prompt are needed."""
        return self.guidance_scale is not None and self.guidance_scale != 1.0

    @property
    def num_sequences(self) -> int:
        """Sequences that run at the same time."""
        return self.num_beams if self.use_beam_search else self.best_of or self.n

    @property
    def num_beams(self) -> int:
        """Number of beams of a beam search."""
        return self.beam_width or self.best_of or self.n

    @property
    def is_ranked(self) -> bool:
        """Whether the sequences are ranked at the end, so that there is no output before."""
        return self.use_beam_search or (self.best_of is not None and self.best_of > self.n)

    @property
    def narrowed_by(self) -> str | None:
        """The name of a field that excludes tokens of the vocabulary, if one does."""
        names = ("allowed_token_ids", "bad_words", "bad_words_token_ids")
        return next((name for name in names if getattr(self, name)), None)

    @property
    def num_entries(self) -> int:
        """Approximate number of entries in its lists, dicts and texts: the cost of checking and sending them."""
        ids = sum(map(len, (self.stop_token_ids or (), self.logit_bias or (), self.allowed_token_ids or ())))
        ids += len(self.forced_token_ids or ())
        ids += sum(map(len, self.bad_words_token_ids or ())) + sum(map(len, self.bad_words or ()))  # a token or less
        num_bytes = sum(map(len, self.stop or ()))
        if self.extra_args:
            num_bytes += len(msgspec.msgpack.encode(self.extra_args))
        return ids + num_bytes // 8

    def clone(self) -> SamplingParams:
        """Returns an independent copy."""
        return msgspec.structs.replace(self)

    def _check_combinations(self) -> None:
        if self.use_beam_search:
            self._check_beam_search()
        else:
            self._check_sampling()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            reject("min_tokens", self.min_tokens, f"an integer from 0 to max_tokens, which is {self.max_tokens}")
        if self.stop and not self.detokenize:
            reject("stop", self.stop, "unset when detokenize is False, since stop strings are looked for in the text")
        if self.forced_token_ids and self.structured_outputs is not None:
            name = "forced_token_ids"
            reject(name, self.forced_token_ids, "unset with structured_outputs, which may not allow these tokens")
        if self.negative_prompt is not None and self.guidance_scale is None:
            reject("negative_prompt", self.negative_prompt, "unset without guidance_scale, which makes use of it")

    def _check_sampling(self) -> None:
        if self.temperature == 0.0:
            equal = "1 when temperature is 0, since greedy sequences would all be equal"
            for name, value in (("n", self.n), ("best_of", self.best_of or 1)):
                if value > 1:
                    reject(name, value, equal)
        if self.best_of is not None and self.best_of < self.n:
            reject("best_of", self.best_of, f"an integer from n, which is {self.n}, to {MAX_N}")
        for name in _BEAM_FIELDS:
            if getattr(self, name) != _DEFAULTS[name]:
                reject(name, getattr(self, name), "unset unless use_beam_search is True")

    def _check_beam_search(self) -> None:
        """Rejects parameters that have no effect, because beam search does not sample."""
        for name in _NOT_WITH_BEAMS:
            if getattr(self, name) != _DEFAULTS[name]:
                reject(name, getattr(self, name), "unset when use_beam_search is True, which does not sample")
        if self.max_tokens == 0:
            reject("max_tokens", 0, "at least 1 when use_beam_search is True")
        if self.temperature not in (0.0, 1.0):
            reject("temperature", self.temperature, "0 or 1 when use_beam_search is True, which does not sample")
        if self.beam_width is not None and self.best_of not in (None, self.beam_width):
            reject("best_of", self.best_of, f"unset, or equal to beam_width, which is {self.beam_width}")
        if not self.n <= self.num_beams <= MAX_BEAM_WIDTH:
            names = (("beam_width", self.beam_width), ("best_of", self.best_of))
            name = next((name for name, given in names if given is not None), "n")
            low = 1 if name == "n" else f"n, which is {self.n},"
            reject(name, self.num_beams, f"an integer from {low} to {MAX_BEAM_WIDTH} when use_beam_search is True")


def validate_for_model(
    params: SamplingParams, *, vocab_size: int, max_model_len: int, max_logprobs: int, prompt_len: int
) -> SamplingParams:
    """Checks the bounds that depend on the model and the prompt, and limits `max_tokens` to the context.

    Args:
        params: Not modified.
        vocab_size: Size of the model's vocabulary.
        max_model_len: Length of the longest sequence, prompt included.
        max_logprobs: Largest `logprobs` and `prompt_logprobs` allowed; -1 allows the whole vocabulary.
        prompt_len: Tokens in the prompt.

    Returns:
        `params`, or a copy with `max_tokens` set to the room in the context if it was None or larger.

    Raises:
        RequestError: A value is out of range, or the prompt leaves no room for a token.
    """
    room = max_model_len - prompt_len
    if room < 1:
        raise RequestError(
            f"the prompt has {prompt_len} tokens, which leaves no room to generate any: the model's context "
            f"(max_model_len) holds {max_model_len}. Shorten the prompt",
            parameter="prompt",
        )
    for token_id in params.stop_token_ids or ():
        if not 0 <= token_id < vocab_size:
            reject("stop_token_ids", token_id, f"token ids from 0 to {vocab_size - 1}, the model's vocabulary")
    for name, token_ids in _token_ids_of(params):
        for token_id in token_ids:
            if token_id >= vocab_size:
                reject(name, token_id, f"made of token ids from 0 to {vocab_size - 1}, the model's vocabulary")
    if params.use_beam_search and params.num_beams > vocab_size:
        reject("beam_width", params.num_beams, f"an integer from 1 to {vocab_size}, the model's vocabulary")
    _check_num_logprobs("logprobs", params.logprobs, vocab_size, max_logprobs)
    _check_num_logprobs("prompt_logprobs", params.prompt_logprobs, vocab_size, max_logprobs)
    if params.min_tokens > room:
        reject("min_tokens", params.min_tokens, f"an integer from 0 to {room}, the room that the prompt leaves")
    if params.max_tokens is None or params.max_tokens > room:
        params = copy.copy(params)  # shallow: the fields are checked already, and may be large
        params.max_tokens = room
    return params


def _token_ids_of(params: SamplingParams) -> Iterator[tuple[str, Iterable[int]]]:
    """The fields with token ids, except stop tokens, and their token ids."""
    if params.logit_bias:
        yield "logit_bias", params.logit_bias
    if params.allowed_token_ids:
        yield "allowed_token_ids", params.allowed_token_ids
    if params.forced_token_ids:
        yield "forced_token_ids", params.forced_token_ids.values()
    for word in params.bad_words_token_ids or ():
        yield "bad_words_token_ids", word
    if params.thinking_tokens is not None:
        for marker in params.thinking_tokens.sequences():
            yield "thinking_tokens", marker


def _check_num_logprobs(name: str, value: int | None, vocab_size: int, max_logprobs: int) -> None:
    if value is None:
        return
    unlimited = max_logprobs == -1 or max_logprobs >= vocab_size
    limit = vocab_size if unlimited else max_logprobs
    if value > limit or (value == -1 and not unlimited):
        allowed = "or -1 (the whole vocabulary)" if unlimited else "which is the engine's max_logprobs"
        reject(name, value, f"an integer from 0 to {limit}, {allowed}")


def _output_kind(name: str, value: object) -> RequestOutputKind:
    number = as_int(value)
    if number is None or number not in RequestOutputKind.__members__.values():
        return reject(name, value, "a RequestOutputKind")
    return RequestOutputKind(number)


FIELD_CHECKS: dict[str, Check] = {
    "n": integer(1, MAX_N),
    "temperature": checks.check_temperature,
    "top_p": number(0.0, 1.0, above=True),
    "top_k": integer(-1, INT64_MAX, means_unset=-1, unset=0),
    "min_p": number(0.0, 1.0),
    "presence_penalty": number(-2.0, 2.0),
    "frequency_penalty": number(-2.0, 2.0),
    "repetition_penalty": number(0.0, LARGEST_FLOAT, above=True),
    "seed": integer(INT64_MIN, INT64_MAX, means_unset=-1, optional=True),
    "stop": checks.check_stop,
    "stop_token_ids": checks.check_stop_token_ids,
    "include_stop_str_in_output": boolean,
    "ignore_eos": boolean,
    "max_tokens": integer(0, INT64_MAX, optional=True),
    "min_tokens": integer(0, INT64_MAX),
    "logprobs": integer(-1, INT64_MAX, optional=True),
    "prompt_logprobs": integer(-1, INT64_MAX, optional=True),
    "flat_logprobs": boolean,
    "detokenize": boolean,
    "skip_special_tokens": boolean,
    "spaces_between_special_tokens": boolean,
    "output_kind": _output_kind,
    "structured_outputs": as_structured_outputs,
    "best_of": integer(1, MAX_N, optional=True),
    "logit_bias": checks.check_logit_bias,
    "allowed_token_ids": checks.check_allowed_token_ids,
    "bad_words": checks.check_bad_words,
    "bad_words_token_ids": checks.check_bad_words_token_ids,
    "truncate_prompt_tokens": checks.check_truncate_prompt_tokens,
    "use_beam_search": boolean,
    "beam_width": integer(1, MAX_BEAM_WIDTH, optional=True),
    "length_penalty": number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
    "early_stopping": checks.check_early_stopping,
    "extra_args": checks.check_extra_args,
    "thinking_token_budget": integer(0, INT64_MAX, optional=True),
    "thinking_tags": check_thinking_tags,
    "thinking_tokens": as_thinking_tokens,
    "logits_processors": checks.check_functions,
    "skip_reading_prefix_cache": boolean,
    "guidance_scale": checks.check_guidance_scale,
    "negative_prompt": checks.check_negative_prompt,
    "token_space": checks.check_token_space,
    "forced_token_ids": checks.check_forced_token_ids,
}
_CHECKS = tuple(
    (field.name, field.default, FIELD_CHECKS[field.name]) for field in msgspec.structs.fields(SamplingParams)
)
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
_BEAM_FIELDS = ("beam_width", "length_penalty", "early_stopping")
_NOT_WITH_BEAMS = (
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "prompt_logprobs",
    "structured_outputs",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "bad_words_token_ids",
    "extra_args",
    "thinking_token_budget",
    "logits_processors",
    "guidance_scale",
    "token_space",
    "forced_token_ids",
)
