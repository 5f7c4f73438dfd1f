"""Suffix decoding in an engine: the tokens are those without it, and repeated text has long drafts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mvllm import SamplingParams
from mvllm.errors import ConfigError
from mvllm.extension_api.draft_heads import ProposerContext
from mvllm_drafts.suffix_proposer import SuffixProposer
from tests.engine.conftest import MakeLLM
from tests.engine.test_async_scheduling import requests
from tests.engine.test_speculative import GREEDY, acceptance, check_close, draw, run, tokens
from tests.helpers.parity import bytes_of_blocks

SUFFIX = {"method": "suffix", "adaptive": False}


def test_every_request_gives_the_outputs_without_speculation(make_llm: MakeLLM) -> None:
    """Also with preemption, and a second time with prefixes and outputs in the caches."""
    prompts, params = (each[:9] for each in requests(seed=7))
    expected = make_llm().generate(prompts, params, use_tqdm=False)
    settings: dict[str, Any] = {"max_num_batched_tokens": 33, "speculative_config": SUFFIX}
    settings["kv_cache_memory_bytes"] = bytes_of_blocks(make_llm(**settings), 12)
    llm = make_llm(**settings)
    for _ in range(2):
        check_close(llm.generate(prompts, params, use_tqdm=False), expected)
    stats = llm.llm_engine.stats
    assert stats is not None and stats.num_preemptions > 0
    guessed, right = acceptance(llm)
    assert 0 < right <= guessed


def test_the_output_of_one_request_is_drafted_for_the_next(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two requests with equal outputs accepts nearly all drafts."""
    made: list[SuffixProposer] = []
    create = SuffixProposer.__init__

    def keep(self: SuffixProposer, context: ProposerContext) -> None:
        made.append(self)
        create(self, context)

    monkeypatch.setattr(SuffixProposer, "__init__", keep)
    prompt = draw(random.Random(3), 20)
    params = SamplingParams(**{**GREEDY, "temperature": 1.0, "seed": 5}, max_tokens=60)
    llm = make_llm(speculative_config={**SUFFIX, "num_speculative_tokens": 8})
    first = run(llm, [prompt], params)
    before = acceptance(llm)
    assert tokens(run(llm, [prompt], params)) == tokens(first)
    guessed, right = (after - earlier for after, earlier in zip(acceptance(llm), before, strict=True))
    assert right > 40 and right / guessed > 0.9
    run(llm, [prompt], SamplingParams(max_tokens=1))
    [proposer] = made
    assert proposer.outputs.index.num_tokens == 2 * 61  # both outputs, each with its end
    assert len(proposer._indexes) <= 1  # those of requests that have ended are dropped

    alone = make_llm(speculative_config={**SUFFIX, "suffix_decoding_max_cached_requests": 0})
    for _ in range(2):
        run(alone, [prompt], params)
    assert acceptance(alone)[1] < 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"suffix_decoding_max_tree_depth": 1}, "suffix_decoding_max_tree_depth must be an integer from 2 to 1024"),
        ({"suffix_decoding_min_token_prob": 2}, "suffix_decoding_min_token_prob must be a number from 0 to 1, found 2"),
        ({"suffix_decoding_max_spec_factor": "x"}, "must be a number from 0 to 1024, found 'x'"),
        ({"suffix_decoding_max_cache": 1}, "which the method 'suffix' does not have. Did you mean"),
    ],
)
def test_settings_are_checked(make_llm: MakeLLM, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_llm(speculative_config={**SUFFIX, **settings})
