"""Two and four ranks under torchrun, each with its own engine: the tokens of one process, the same on every rank.

Starting a launch takes longer than running it, so each layout is launched once, with several checkpoints; `ci/dev.py
test --all` uses one of every family. The shards of a rank do not depend on the launcher. Each engine has a step budget
that cuts prompts into chunks and a KV cache that is too small for its requests.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine import launched_rank
from tests.helpers import parity
from tests.helpers.parity import BLOCK_SIZE, LOGPROB_TOLERANCE, MAX_LEN
from tests.helpers.plugins import fault_platform_path

NAMES = (
    "llama-gqa",
    "llama-rope-dynamic",
    "mistral-window",
    "qwen2-mqa-tied",
    "qwen3-biases-window",
    "opt-norm-after-projected",
    "gpt2",
)
ODDEST = ("llama-rope-dynamic", "qwen2-mqa-tied")
"""RoPE angles that depend on the prompt's length; tied embeddings over two stages."""
WHICH = (0, 3, 5, 6, 8)
"""Prompts of the oracle, of 1 to 48 tokens. Some share prefixes."""
NUM_TOKENS = 28
NUM_BLOCKS = MAX_LEN // BLOCK_SIZE
"""Enough for one sequence of the maximum length."""
RANK = ["--module", launched_rank.__name__]


def launch(world_size: int, arguments: list[str], env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and output of a launch; no process of it is left."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    process = subprocess.Popen(
        [*command, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=240)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, text


def job_of(name: str, **settings: Any) -> dict[str, Any]:
    expected = parity.oracle(name, WHICH, NUM_TOKENS)
    defaults = {
        "model": str(expected.folder),
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_LEN,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 24,
        "kv_cache_memory_bytes": 2**24,
        "seed": 0,
        "use_tqdm_on_load": False,
    }
    return {
        "settings": defaults | settings,
        "blocks": NUM_BLOCKS,
        "prompts": expected.prompts,
        "num_tokens": NUM_TOKENS,
    }


@functools.cache
def single_process(name: str) -> dict[str, Any]:
    """Results of one process for the same job."""
    return launched_rank.run_engine(job_of(name))


def check_against_oracle(name: str, found: list[dict[str, Any]]) -> None:
    expected = parity.oracle(name, WHICH, NUM_TOKENS)
    for i, output in enumerate(found):
        assert output["tokens"] == expected.tokens[i], f"{name}, prompt {i}"
        for position, entries in enumerate(output["logprobs"]):
            for token, logprob, _ in entries:
                assert abs(logprob - float(expected.logprobs[i][position][token])) < LOGPROB_TOLERANCE


def check_close(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    """Equal tokens, log-probabilities within tolerance."""
    for a, b in zip(one, other, strict=True):
        assert a["tokens"] == b["tokens"] and a["finish_reason"] == b["finish_reason"]
        for kind in ("logprobs", "prompt_logprobs"):
            assert (a[kind] is None) == (b[kind] is None)
            for left, right in zip(a[kind] or [], b[kind] or [], strict=True):
                assert (left is None) == (right is None)
                for (token, logprob, _), (other_token, other_logprob, _) in zip(left or [], right or [], strict=True):
                    assert token == other_token and abs(logprob - other_logprob) < LOGPROB_TOLERANCE


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "names"),
    [
        *(pytest.param(*layout, NAMES, marks=pytest.mark.exhaustive) for layout in ((2, 1), (1, 2), (2, 2))),
        (1, 2, ODDEST),  # the program below has tensor parallel ranks
    ],
)
def test_every_family_gives_the_tokens_of_one_process_on_every_rank(
    tp_size: int, pp_size: int, names: tuple[str, ...], tmp_path: Path
) -> None:
    parallel = {
        "tensor_parallel_size": tp_size,
        "pipeline_parallel_size": pp_size,
        "distributed_executor_backend": "external_launcher",
    }
    job, world_size = tmp_path / "job.json", tp_size * pp_size
    job.write_text(json.dumps({"engines": [job_of(name, **parallel) for name in names]}))
    code, text = launch(world_size, [*RANK, str(job), str(tmp_path)])
    assert code == 0, text
    by_rank = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world_size)]
    for rank, results in enumerate(by_rank):
        assert results == by_rank[0], f"rank {rank} and rank 0 differ"
    for name, found in zip(names, by_rank[0], strict=True):
        if (
            "window" not in name
        ):  # layers with windows free their blocks, and may need no more blocks than the first allocation
            assert found["num_blocks"] == NUM_BLOCKS
            assert found["num_preemptions"] > 0
            assert any(output["num_cached_tokens"] for output in found["again"])
        check_against_oracle(name, found["greedy"])
        check_against_oracle(name, found["again"])
        for kind in ("drawn", "prompts"):
            check_close(found[kind], single_process(name)[kind])


@pytest.mark.exhaustive
def test_speculative_ranks_agree_on_the_tokens_of_one_process(tmp_path: Path) -> None:
    name = "qwen2-mqa-tied"
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    itself = {"model": str(parity.oracle(name, WHICH, NUM_TOKENS).folder), "num_speculative_tokens": 3}
    parallel = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "distributed_executor_backend": "external_launcher",
    }
    job = tmp_path / "job.json"
    jobs = [job_of(name, **parallel, speculative_config=each) for each in (ngram, itself)]
    job.write_text(json.dumps({"engines": jobs}))
    code, text = launch(4, [*RANK, str(job), str(tmp_path)])
    assert code == 0, text
    by_rank = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert all(results == by_rank[0] for results in by_rank)
    for found in by_rank[0]:
        check_against_oracle(name, found["greedy"])
        check_against_oracle(name, found["again"])
        for kind in ("drawn", "prompts"):
            check_close(found[kind], single_process(name)[kind])


@pytest.mark.parametrize("poor", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
@pytest.mark.exhaustive
def test_the_rank_with_the_least_memory_decides_for_every_engine(poor: int, tmp_path: Path) -> None:
    free = 200 << 20  # for two ranks, minus the tenth that the engine must not use
    paths = [*fault_platform_path(tmp_path / "plugins"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"FAULT_INJECTION": f"poor@memory:rank={poor},free={free}", "PYTHONPATH": os.pathsep.join(paths)}
    settings = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher", "platform": "faulty"}
    memory = {
        "kv_cache_memory_bytes": None,
        "memory_utilization": 0.9,
        "max_num_seqs": 2048,
        "max_num_batched_tokens": None,
    }
    described = job_of("llama-gqa", **settings, **memory)
    del described["blocks"]
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"engines": [described]}))
    code, text = launch(2, [*RANK, str(job), str(tmp_path)], env)
    assert code == 0, text
    [first], [second] = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert 0 < first["num_blocks"] < 2048 * MAX_LEN // BLOCK_SIZE
    check_against_oracle("llama-gqa", first["greedy"])


PROGRAM = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from mvllm import LLM, SamplingParams

model, folder = sys.argv[1:]
common = dict(
    model=model, max_model_len=64, kv_cache_memory_bytes=2**20, use_tqdm_on_load=False,
    distributed_executor_backend="external_launcher",
)
said = []
for wrong in ({"tensor_parallel_size": 4}, {"tensor_parallel_size": 2, "seed": int(os.environ["RANK"])}):
    try:
        LLM(**common, **wrong)
    except Exception as e:
        said.append(f"{type(e).__name__}: {e}")
Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(said))

dist.init_process_group("gloo")
seeds, given = set(), (None, None, 3)
for seed in given:
    with LLM(**common, tensor_parallel_size=2, seed=seed) as llm:
        seeds.add(llm.llm_engine.model_config.seed)
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        tokens = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0].token_ids
    total = torch.tensor(list(tokens))
    dist.all_reduce(total)
    assert total.tolist() == [2 * t for t in tokens], (total, tokens)
assert len(seeds) == len(given) and 3 in seeds, seeds  # drawn anew for each engine
total = torch.tensor(sorted(seeds))
dist.all_reduce(total)
assert total.tolist() == [2 * seed for seed in sorted(seeds)], "each rank has another seed"
dist.destroy_process_group()
"""


def test_wrong_settings_are_rejected_on_every_rank_and_an_existing_process_group_is_reused_and_kept(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    code, text = launch(2, [str(program), str(parity.oracle("llama-gqa", WHICH, NUM_TOKENS).folder), str(tmp_path)])
    assert code == 0, text
    for rank in range(2):
        sizes, settings = json.loads((tmp_path / f"{rank}.json").read_text())
        assert "The launcher started 2 ranks, but tensor_parallel_size 4 × pipeline_parallel_size 1 makes 4" in sizes
        assert "Every rank must be started with the same settings, but seed is 0 on rank 0 and 1 on rank 1" in settings
