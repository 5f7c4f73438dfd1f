"""The EAGLE-3 head of the demo model, which the package brings."""

from __future__ import annotations

import json

from mvllm import LLM, SamplingParams
from mvllm_drafts.methods import DEMO_HEAD

QUESTIONS = ("Tell me a story about a fox named Nia.", "What is the capital of Japan?")


def test_most_of_its_drafts_are_accepted_and_no_token_changes() -> None:
    config = {"method": "eagle3", "model": "demo", "adaptive": False}
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    found = []
    for settings in ({}, {"speculative_config": config}):
        with LLM("demo", dtype="float32", kv_cache_memory_bytes=2**25, use_tqdm_on_load=False, **settings) as llm:
            outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
            found.append([list(output.outputs[0].token_ids) for output in outputs])
            stats = llm.llm_engine.stats
    assert found[0] == found[1]
    assert stats is not None and stats.num_accepted_tokens > 0.6 * stats.num_draft_tokens > 0
    assert json.loads((DEMO_HEAD / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]
