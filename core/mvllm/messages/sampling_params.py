"""How the tokens of one request are chosen."""

from __future__ import annotations

import enum

import msgspec


class RequestOutputKind(enum.IntEnum):
    """How much each output repeats."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sampling settings of one request; the names and defaults are the field's usual ones.

    Attributes:
        n: Number of sequences to generate from the prompt, at least 1.
        temperature: Finite and >= 0; 0 takes the most probable token (greedy).
        top_p: In (0, 1]: keep the smallest set of most probable tokens whose probability reaches this.
        top_k: Keep this many most probable tokens; 0 or -1 keeps all.
        min_p: In [0, 1]: drop tokens less probable than this fraction of the most probable one.
        presence_penalty: In [-2, 2], subtracted once from the logit of each token generated so far.
        frequency_penalty: In [-2, 2], subtracted once per occurrence among the generated tokens.
        repetition_penalty: > 0; divides positive and multiplies negative logits of tokens in prompt or output.
        seed: Makes the request's samples reproducible whatever else is in the batch; -1 means None.
        stop: Text or texts that end the output.
        stop_token_ids: Tokens that end the output.
        include_stop_str_in_output: Keep the stop text in the output.
        ignore_eos: Go on after the end-of-sequence token.
        max_tokens: Tokens to generate at most; None means as many as the context holds.
        min_tokens: No end or stop token before this many tokens.
        logprobs: Return the log-probabilities of the sampled token and of this many most probable ones; -1 for all.
        prompt_logprobs: Likewise for each prompt token. Such a request does not read the prefix cache.
        detokenize: Turn the output into text.
        skip_special_tokens: Leave special tokens out of the text.
        spaces_between_special_tokens: Put spaces between special tokens in the text.
        output_kind: What each output of the engine carries.
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
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
