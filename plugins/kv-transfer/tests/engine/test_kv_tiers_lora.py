"""Blocks of LoRA adapters in tiers: found by the hash of the adapter's files, whatever the adapter is called."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mvllm import LLM, LoRARequest, SamplingParams
from tests.helpers.lora_adapters import write_adapter
from tests.helpers.parity import engine

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
PROMPT = [5 + i % 90 for i in range(70)]


@pytest.fixture(scope="module")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, checkpoint, seed=seed) for seed, name in enumerate(("one", "two"))}


def run(llm: LLM, name: str, number: int, path: Path) -> tuple[list[int], int]:
    """Tokens, and cached prompt tokens."""
    request = LoRARequest(name, number, str(path))
    [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False, lora_request=request)
    return list(output.outputs[0].token_ids), output.num_cached_tokens or 0


LIMITS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "block_size": 16}


def test_a_restarted_engine_finds_blocks_of_equal_adapters_only(
    checkpoint: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    settings = {**LIMITS, "kv_disk_cache": str(tmp_path / "kv")}
    used = shutil.copytree(adapters["one"], tmp_path / "used")
    with engine(checkpoint, **settings) as llm:
        one, cached = run(llm, "mine", 1, used)
        assert cached == 0
        [base] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
        assert not base.num_cached_tokens
    with engine(checkpoint, **settings) as llm:
        assert run(llm, "mine", 1, used) == (one, 64)
        # The same files under another name, id and folder.
        assert run(llm, "theirs", 5, adapters["one"]) == (one, 64)
    shutil.copytree(adapters["two"], used, dirs_exist_ok=True)  # the same name, id and folder, and other weights
    with engine(checkpoint, **settings) as llm:
        two, cached = run(llm, "mine", 1, used)
        assert cached == 0 and two != one


@pytest.mark.exhaustive
def test_tokens_are_those_without_tiers_also_after_an_adapter_was_replaced(
    checkpoint: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    with engine(checkpoint, **LIMITS) as llm:
        one, _ = run(llm, "mine", 1, adapters["one"])
        two, _ = run(llm, "other", 2, adapters["two"])
        assert one != two
    settings = {**LIMITS, "kv_disk_cache": str(tmp_path / "kv")}
    with engine(checkpoint, **settings) as llm:
        assert run(llm, "mine", 1, adapters["one"]) == (one, 0)
        assert run(llm, "other", 2, adapters["two"]) == (two, 0)
    with engine(checkpoint, **settings) as llm:
        assert run(llm, "mine", 1, adapters["two"]) == (two, 64)
        llm.update_lora(LoRARequest("mine", 1, str(adapters["one"])))
        assert run(llm, "mine", 1, adapters["one"]) == (one, 0)  # new weights: nothing that was stored is found
        assert run(llm, "other", 2, adapters["two"]) == (two, 0)
    with engine(checkpoint, **settings) as llm:
        assert run(llm, "mine", 1, adapters["one"]) == (one, 64)
