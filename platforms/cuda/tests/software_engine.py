"""Runs the engine on the platform `software` and on the CPU platform, and prints the tokens of both as JSON.

    python -m platforms.cuda.tests.software_engine FOLDER CASE ...

A CASE is `MODEL` or `MODEL:OPTION,...`; the options are `graphs`, `sampled`, `lora`, `offload` (a prompt's blocks are
in host memory while the engine sleeps), `triton` (products of few rows by the kernel) and the dtypes of a KV cache.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import platforms.cuda.tests.software_platform as software

from mvllm import LLM, LoRARequest, SamplingParams
from tests.helpers.lora_adapters import write_adapter
from tests.helpers.model_zoo import make_checkpoint

PROMPTS = [{"prompt_token_ids": [5 + 7 * i + j for j in range(3 + 4 * i)]} for i in range(2)]
LONG_PROMPTS = [{"prompt_token_ids": [5 + j * j % 50 for j in range(40)]}]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 48,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "kv_cache_memory_bytes": 1 << 20,
}
KV_DTYPES = ("int8", "float8_e4m3fn")


def run(folder: Path, case: str, platform: str) -> dict[str, Any]:
    """The tokens of each request, and how many graphs were replayed."""
    model, _, listed = case.partition(":")
    options = listed.split(",") if listed else []
    checkpoint = folder / model
    if not checkpoint.exists():
        make_checkpoint(model, checkpoint)
    settings = {**SETTINGS, "enforce_eager": "graphs" not in options}
    for name in KV_DTYPES:
        if name in options:
            settings["kv_cache_dtype"] = name
    params: dict[str, Any] = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    if "sampled" in options:
        params |= {"temperature": 0.8, "seed": 7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logprobs": 2}
        params |= {"repetition_penalty": 1.1, "presence_penalty": 0.2}
    lora = None
    if "lora" in options:
        adapter = folder / f"{model}-adapter"
        lora = LoRARequest("adapter", 1, str(adapter if adapter.exists() else write_adapter(adapter, checkpoint)))
        settings |= {"enable_lora": True}
    prompts = PROMPTS
    if "offload" in options:
        prompts, settings["kv_offloading_size"] = LONG_PROMPTS, 0.01
    os.environ["MVLLM_CUDA_LINEAR"] = "triton" if "triton" in options else "torch"
    software.SoftwarePlatform.graphs_made.clear()
    with LLM(str(checkpoint), platform=platform, **settings) as llm:
        outputs = llm.generate(prompts, SamplingParams(**params), use_tqdm=False, lora_request=lora)
        if "offload" in options:
            llm.sleep(level=1)
            llm.wake_up()
            outputs = llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "replays": sum(graphs.replays for graphs in software.SoftwarePlatform.graphs_made),
    }


def main(folder: Path, cases: Sequence[str]) -> None:
    """Runs the cases one after the other; a failed one has its error in place of its results."""
    found: dict[str, Any] = {}
    for case in cases:
        try:
            found[case] = {platform: run(folder, case, platform) for platform in ("cpu", "software")}
        except Exception:  # the test shows it
            found[case] = traceback.format_exc()
        print(case, "is done", file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
