"""Compares the engine with transformers: same prompts, greedy, float32; equal tokens and close log-probabilities.

transformers computes each prompt alone. The engine must give the same results when it batches the prompts, splits them
into chunks, uses cached prefixes, or preempts and recomputes them.
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from mvllm import LLM, RequestOutput, SamplingParams
from tests.helpers.model_zoo import VOCAB_SIZE, ZOO, load_reference, make_checkpoint

NUM_TOKENS = 64
BLOCK_SIZE = 16
MAX_LEN = 176
LOGPROB_TOLERANCE = 1e-4
PROMPT_LENGTHS = (1, 2, 7, 15, 16, 17, 31, 33, 48, 5, 64, 97, 3, 20, 40, 48)


@dataclass(frozen=True)
class Oracle:
    """Outputs of transformers for the prompts of one checkpoint.

    Attributes:
        folder: The checkpoint.
        prompts: Token ids; some share prefixes of several blocks.
        tokens: [prompts][num_tokens]: greedy continuations.
        logprobs: [prompts] of float32 [num_tokens, vocabulary].
        prompt_logprobs: [prompts] of float32 [length - 1, vocabulary]: row i predicts token i + 1.
    """

    folder: Path
    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: list[torch.Tensor]
    prompt_logprobs: list[torch.Tensor]


def names_of(*families: str) -> list[str]:
    """The zoo's checkpoints of some families."""
    return [name for name in ZOO if name.split("-")[0] in families]


@functools.cache
def oracle(name: str, which: tuple[int, ...] | None = None, num_tokens: int = NUM_TOKENS) -> Oracle:
    """Runs transformers on checkpoint `name`; cached for the life of the process.

    Args:
        name: A key of ZOO.
        which: Prompts to keep, by their index in PROMPT_LENGTHS; None for all.
        num_tokens: Number of tokens to generate for each.
    """
    folder = make_checkpoint(name, Path(tempfile.mkdtemp(prefix="mvllm-parity-")) / name)
    remembers = ZOO[name].max_prompt_len < MAX_LEN
    return oracle_of(folder, prompts_of(name, which), num_tokens, remembers=remembers)


def oracle_of(folder: Path, prompts: list[list[int]], num_tokens: int, *, remembers: bool = False) -> Oracle:
    """Runs transformers on the checkpoint in `folder`.

    A sequence is the greedy one if each token is the unique argmax after its predecessors. So one forward pass over a
    correct draft verifies it and gives all logits. transformers drafts all prompts in one padded batch, then runs one
    pass per prompt. It generates token by token for a wrong draft, and for the longest prompt of every checkpoint.

    Args:
        remembers: The model's RoPE angles depend on the sequence's length: keys keep the angles of the time when they
        were computed, and the model keeps the scaling of the previous sequence. A new model generates each prompt.
    """
    model = load_reference(folder)
    drafts = [None] * len(prompts) if remembers else _generate_batch(model, prompts, num_tokens)
    longest = max(prompts, key=len)
    tokens, logprobs, prompt_logprobs = [], [], []
    with torch.inference_mode():
        for prompt, draft in zip(prompts, drafts, strict=True):
            model = load_reference(folder) if remembers else model
            logits = model(torch.tensor([prompt + (draft or [])[:-1]])).logits[0].float()
            over_prompt, following = logits[: len(prompt) - 1], logits[len(prompt) - 1 :]
            is_accepted = draft is not None and following.argmax(-1).tolist() == draft
            if prompt is longest or not is_accepted:
                generated, stepwise = _generate_alone(model, prompt, num_tokens)
                assert not is_accepted or generated == draft, (
                    f"{folder}: transformers with and without its cache differ"
                )
                draft, following = generated, stepwise
            tokens.append(draft)
            logprobs.append(torch.log_softmax(following, dim=-1))
            prompt_logprobs.append(torch.log_softmax(over_prompt, dim=-1))
    return Oracle(folder, prompts, tokens, logprobs, prompt_logprobs)


def _generate_batch(model: PreTrainedModel, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy continuations of all prompts, padded to one length; the caller checks the effect of padding."""
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return _greedy(model, ids, mask, num_tokens).sequences[:, length:].tolist()


def _generate_alone(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """The greedy continuation, token by token, and the logits of each: [num_tokens, vocabulary]."""
    ids = torch.tensor([prompt])
    result = _greedy(model, ids, torch.ones_like(ids), num_tokens)
    return result.sequences[0, len(prompt) :].tolist(), torch.cat(result.logits).float()


def _greedy(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, num_tokens: int) -> Any:
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )


@contextmanager
def engine(folder: Path, **settings: object) -> Iterator[LLM]:
    """An engine for float32 on the platform under test."""
    defaults: dict[str, object] = {
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_LEN,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 2**24,
        "seed": 0,
        "use_tqdm_on_load": False,
    }
    with LLM(model=str(folder), **(defaults | settings)) as llm:
        yield llm


def generate(llm: LLM, prompts: list[list[int]], **settings: object) -> list[RequestOutput]:
    """Greedy continuations of NUM_TOKENS tokens, with log-probabilities."""
    params = SamplingParams(
        **(
            {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 2, "detokenize": False}
            | settings
        )
    )
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(asked, params, use_tqdm=False, raise_on_error=False)


def check_tokens_without_logprobs(checkpoint: str = "llama-gqa") -> None:
    """Asserts that requests without log-probabilities get the same tokens, alone and together."""
    found = oracle(checkpoint, num_tokens=8)
    with engine(found.folder) as llm:
        for prompts in (found.prompts[5:6], found.prompts):
            outputs = generate(llm, prompts, max_tokens=8, logprobs=None)
            expected = found.tokens[5:6] if len(prompts) == 1 else found.tokens
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected


def check(expected: Oracle, outputs: list[RequestOutput], which: list[int] | None = None) -> None:
    """Asserts that the outputs match the oracle: equal tokens, log-probabilities within tolerance."""
    for i, output in zip(which or range(len(outputs)), outputs, strict=True):
        where = f"prompt {i} of {len(expected.prompts[i])} tokens"
        found = output.outputs[0]
        assert list(found.token_ids) == expected.tokens[i], where
        assert found.logprobs is not None
        for position, entries in enumerate(found.logprobs):
            reference = expected.logprobs[i][position]
            assert len(entries) >= 2
            for token, entry in entries.items():
                off = abs(entry.logprob - float(reference[token]))
                assert off < LOGPROB_TOLERANCE, f"{where}, output token {position}: off by {off}"


def check_prompt_logprobs(expected: Oracle, outputs: list[RequestOutput]) -> None:
    """Asserts that the log-probabilities of the prompts' tokens match the oracle."""
    for i, output in enumerate(outputs):
        prompt, found = expected.prompts[i], output.prompt_logprobs
        assert found is not None and len(found) == len(prompt) and found[0] is None
        for position in range(1, len(prompt)):
            entries, reference = found[position], expected.prompt_logprobs[i][position - 1]
            assert entries is not None and prompt[position] in entries
            for token, entry in entries.items():
                assert abs(entry.logprob - float(reference[token])) < LOGPROB_TOLERANCE, f"prompt {i}, token {position}"
            own = reference[prompt[position]]
            best = 1 + int((reference > own + LOGPROB_TOLERANCE).sum())
            worst = 1 + int((reference > own - LOGPROB_TOLERANCE).sum()) - 1
            assert best <= entries[prompt[position]].rank <= worst


def bytes_of_blocks(llm: LLM, num_blocks: int) -> int:
    """Bytes of `num_blocks` blocks of the cache of `llm`."""
    summary = llm.llm_engine.cache_summary
    return summary.total_bytes // summary.num_blocks * num_blocks


def prompts_of(name: str, which: tuple[int, ...] | None = None) -> list[list[int]]:
    """The prompts of checkpoint `name`, or some of them, by their index in PROMPT_LENGTHS."""
    rng = random.Random(name)
    shared = [rng.randrange(2, VOCAB_SIZE) for _ in range(max(PROMPT_LENGTHS))]
    prompts = []
    for i, length in enumerate(PROMPT_LENGTHS):
        own = 1 + length // 3
        # Every third prompt shares a prefix with the others of its kind.
        start = shared[: length - own] if i % 3 == 0 else []
        prompts.append(start + [rng.randrange(2, VOCAB_SIZE) for _ in range(length - len(start))])
    return prompts if which is None else [prompts[i] for i in which]
