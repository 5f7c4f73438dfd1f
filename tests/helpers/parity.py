"""The engine beside transformers: same prompts, greedy, float32; tokens must be equal and log-probabilities close.

transformers generates each prompt alone, token by token. The engine must give the same whatever it does meanwhile:
batch the prompts, cut them into chunks, find their prefixes in the cache, preempt and recompute them.
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from mvllm import LLM, RequestOutput, SamplingParams
from tests.helpers.model_zoo import VOCAB_SIZE, ZOO, load_reference, make_checkpoint

NUM_TOKENS = 64
BLOCK_SIZE = 16
MAX_LEN = 176
LOGPROB_TOLERANCE = 1e-4
PROMPT_LENGTHS = (1, 2, 7, 15, 16, 17, 31, 33, 48, 5, 64, 97, 3, 20, 40, 48)


@dataclass(frozen=True)
class Oracle:
    """What transformers makes of the prompts of one checkpoint.

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
    """Runs transformers on checkpoint `name`; kept for the life of the process.

    Args:
        name: A key of ZOO.
        which: Prompts to keep, by their place in PROMPT_LENGTHS; None for all.
        num_tokens: How far to continue each.
    """
    folder = make_checkpoint(name, Path(tempfile.mkdtemp(prefix="mvllm-parity-")) / name)
    remembers = ZOO[name].max_prompt_len < MAX_LEN  # its RoPE keeps what the sequence before was scaled to
    return oracle_of(folder, prompts_of(name, which), num_tokens, remembers=remembers)


def oracle_of(folder: Path, prompts: list[list[int]], num_tokens: int, *, remembers: bool = False) -> Oracle:
    """Runs transformers on the checkpoint in `folder`.

    Args:
        remembers: The model has to be loaded anew for each prompt.
    """
    model = load_reference(folder)
    tokens, logprobs, prompt_logprobs = [], [], []
    for prompt in prompts:
        model = load_reference(folder) if remembers else model
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            over_prompt = model(ids).logits[0, :-1]
            result = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        tokens.append(result.sequences[0, len(prompt) :].tolist())
        logprobs.append(torch.log_softmax(torch.cat(result.logits).float(), dim=-1))
        prompt_logprobs.append(torch.log_softmax(over_prompt.float(), dim=-1))
    return Oracle(folder, prompts, tokens, logprobs, prompt_logprobs)


@contextmanager
def engine(folder: Path, **settings: object) -> Iterator[LLM]:
    """An engine for float32 on the platform under test."""
    defaults: dict[str, object] = {
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_LEN,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 2**24,
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
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def check(expected: Oracle, outputs: list[RequestOutput], which: list[int] | None = None) -> None:
    """Fails unless the outputs are the oracle's, tokens exactly and log-probabilities within tolerance."""
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
    """Fails unless the log-probabilities of the prompts' tokens are the oracle's."""
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
    """What `num_blocks` blocks of the cache of `llm` take."""
    summary = llm.llm_engine.cache_summary
    return summary.total_bytes // summary.num_blocks * num_blocks


def prompts_of(name: str, which: tuple[int, ...] | None = None) -> list[list[int]]:
    """The prompts of checkpoint `name`, or some of them, by their place in PROMPT_LENGTHS."""
    rng = random.Random(name)
    shared = [rng.randrange(2, VOCAB_SIZE) for _ in range(max(PROMPT_LENGTHS))]
    prompts = []
    for i, length in enumerate(PROMPT_LENGTHS):
        own = 1 + length // 3
        # Every third prompt begins like the others of its kind.
        start = shared[: length - own] if i % 3 == 0 else []
        prompts.append(start + [rng.randrange(2, VOCAB_SIZE) for _ in range(length - len(start))])
    return prompts if which is None else [prompts[i] for i in which]
