"""Logits of every architecture equal transformers', for prompts and for decoding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from mvllm.config.rope_parameters import prompt_cache_key
from tests.helpers.model_zoo import MAX_LEN, VOCAB_SIZE, ZOO, load_reference, make_checkpoint, marked
from tests.helpers.paged_driver import PagedDriver, load_model, make_context, read_config

PROMPT_LEN, TOTAL_LEN = 40, 64
TOLERANCE = 1e-4


FolderOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """Makes a checkpoint of the zoo when it is first asked for."""
    return cache(lambda name: make_checkpoint(name, tmp_path_factory.mktemp("zoo") / name, tokenizer=False))


def draw_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, tokens: list[int], prompt_len: int | None = None) -> torch.Tensor:
    """transformers' logits, in one pass; with `prompt_len` as in `generate`, first the prompt, then token by token.

    The passes differ for a RoPE scaling that depends on the sequence's length.
    """
    if prompt_len is None or model._is_stateful:
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0]
        return found
    cache = DynamicCache(config=model.config)
    pieces = [tokens[:prompt_len], *([token] for token in tokens[prompt_len:])]
    logits = [model(torch.tensor([piece]), past_key_values=cache, use_cache=True).logits[0] for piece in pieces]
    return torch.cat(logits)


def run_mixed(driver: PagedDriver, plans: list[tuple[list[int], int, list[int]]]) -> list[torch.Tensor]:
    """Runs several requests in one batch. A plan is (tokens, prompt length, chunk sizes of the prompt)."""
    sequences = [driver.add(prompt_len) for _, prompt_len, _ in plans]
    queues = []
    for tokens, prompt_len, chunks in plans:
        assert sum(chunks) == prompt_len
        sizes = chunks + [1] * (len(tokens) - prompt_len)
        ends = torch.tensor(sizes).cumsum(0).tolist()
        queues.append([tokens[end - size : end] for size, end in zip(sizes, ends, strict=True)])
    results: list[list[torch.Tensor]] = [[] for _ in plans]
    while any(queues):
        busy = [i for i, queue in enumerate(queues) if queue]
        for i, logits in zip(busy, driver.step([(sequences[i], queues[i].pop(0)) for i in busy]), strict=True):
            results[i].append(logits)
    return [torch.cat(result) for result in results]


@pytest.mark.parametrize("name", marked(ZOO))
def test_logits_equal_transformers(name: str, folder_of: FolderOf) -> None:
    folder = folder_of(name)
    reference, driver = load_reference(folder), PagedDriver(load_model(folder))
    plans = [
        (draw_tokens(TOTAL_LEN, seed=1), PROMPT_LEN, [PROMPT_LEN]),
        (draw_tokens(30, seed=2), 9, [9]),
        (draw_tokens(TOTAL_LEN, seed=3), 33, [7, 7, 7, 7, 5]),
        (draw_tokens(12, seed=4), 1, [1]),
    ]
    for ours, (tokens, prompt_len, _) in zip(run_mixed(driver, plans), plans, strict=True):
        depends_on_length = ZOO[name].max_prompt_len < MAX_LEN
        expected = reference_logits(reference, tokens, prompt_len if depends_on_length else None)
        assert expected.std() > 0.5, "logits too close together to tell right from wrong"
        torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["llama-rope-dynamic", "llama-rope-longrope"])
@pytest.mark.parametrize("chunks", [[70], [16, 16, 16, 16, 6]], ids=["whole", "chunked"])
def test_prompts_beyond_the_original_context_equal_transformers(
    name: str, chunks: list[int], folder_of: FolderOf
) -> None:
    folder = folder_of(name)
    reference, driver = load_reference(folder), PagedDriver(load_model(folder))
    tokens = draw_tokens(90, seed=5)
    (ours,) = run_mixed(driver, [(tokens, 70, chunks)])
    torch.testing.assert_close(ours, reference_logits(reference, tokens, 70), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", marked(ZOO))
def test_prompts_with_batch_independent_rope_share_cached_keys(name: str, folder_of: FolderOf) -> None:
    key = prompt_cache_key(read_config(folder_of(name)))
    longest = ZOO[name].max_prompt_len
    assert {key(prompt_len) for prompt_len in range(1, longest + 1)} == {0}
    assert (key(longest + 1) == 0) == (longest == MAX_LEN)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "opt", "gpt2", "qwen35", "kimilinear"])
def test_bfloat16_stays_near_float32(name: str, folder_of: FolderOf) -> None:
    folder = folder_of(name)
    reference = load_reference(folder)
    driver = PagedDriver(load_model(folder, make_context(dtype=torch.bfloat16)))
    tokens = draw_tokens(PROMPT_LEN, seed=6)
    (ours,) = driver.step([(driver.add(PROMPT_LEN), tokens)])
    expected = reference_logits(reference, tokens, PROMPT_LEN)
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - expected).pow(2).mean().sqrt() < 0.06 * expected.std()
