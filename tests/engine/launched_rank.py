"""Program of each rank under a launcher: runs the engines that a job file describes, one after the other.

    python -m torch.distributed.run --standalone --nproc-per-node 2 launched_rank.py job.json out

`job.json` holds {"engines": [{"settings": ..., "blocks": ..., "prompts": ...}, ...]}; rank r writes `out/r.json`.
Prompts are token ids, or as `LLM.generate` takes them.
Imports only the package, so that ranks start quickly.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from mvllm import LLM, RequestOutput, SamplingParams

GREEDY = {"temperature": 0, "ignore_eos": True, "logprobs": 2, "detokenize": False}
DRAWN = {"temperature": 1.1, "top_p": 0.95, "ignore_eos": True, "logprobs": 0, "detokenize": False}


def describe(outputs: list[RequestOutput]) -> list[dict[str, Any]]:
    """All parts of the outputs that must be equal, as JSON values."""
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": _entries(output.outputs[0].logprobs),
            "prompt_logprobs": _entries(output.prompt_logprobs),
            "num_cached_tokens": output.num_cached_tokens,
            "finish_reason": output.outputs[0].finish_reason,
        }
        for output in outputs
    ]


def run_engine(job: dict[str, Any]) -> dict[str, Any]:
    """Generates greedily, again from the prefix cache, and with and without seeds."""
    settings = dict(job["settings"])
    prompts = [prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt} for prompt in job["prompts"]]
    if "blocks" in job:  # the same number of blocks on each rank, whatever its KV bytes per token
        with LLM(**settings) as llm:
            summary = llm.llm_engine.cache_summary
        num_blocks = max(job["blocks"], summary.blocks_per_request)  # layers with windows have their own blocks
        settings["kv_cache_memory_bytes"] = summary.total_bytes // summary.num_blocks * num_blocks
    with LLM(**settings) as llm:
        length = {"max_tokens": job["num_tokens"]}
        drawn = [SamplingParams(**DRAWN, **length, seed=i if i % 2 else None) for i in range(len(prompts))]
        return {
            "greedy": describe(llm.generate(prompts, SamplingParams(**GREEDY, **length), use_tqdm=False)),
            "again": describe(llm.generate(prompts, SamplingParams(**GREEDY, **length), use_tqdm=False)),
            "drawn": describe(llm.generate(prompts, drawn, use_tqdm=False)),
            "prompts": describe(
                llm.generate(prompts, SamplingParams(**GREEDY, max_tokens=1, prompt_logprobs=1), use_tqdm=False)
            ),
            "num_blocks": llm.llm_engine.cache_summary.num_blocks,
            "num_preemptions": llm.llm_engine.stats.num_preemptions if llm.llm_engine.stats else 0,
        }


def _entries(positions: Any) -> list[Any] | None:
    if positions is None:
        return None
    return [
        None if entries is None else [[token, entry.logprob, entry.rank] for token, entry in entries.items()]
        for entries in positions
    ]


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text())["engines"]
    results = [run_engine(job) for job in jobs]
    Path(sys.argv[2], f"{os.environ['RANK']}.json").write_text(json.dumps(results))
