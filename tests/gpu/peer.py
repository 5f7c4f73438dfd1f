"""Runs transformers' continuous batching on the engine's requests."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.gpu.result_log import FAILED, MEASURED, ResultLog, Row
from tests.gpu.settings import Settings

if TYPE_CHECKING:
    from tests.gpu.bench import Plan


def measure_peer(name: str, folder: Path, item: str, plan: Plan, settings: Settings, result_log: ResultLog) -> None:
    """Output tokens per second. It takes one number of output tokens for all requests: the mean.

    The requests run twice, and the second time counts: in the first it claims its cache and captures its graphs.
    """
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    from tests.gpu.bench import alike_requests
    from tests.gpu.device import open_device
    from tests.gpu.models import CONFIGS

    prompts, length = alike_requests(plan, CONFIGS[name]["vocab_size"])
    with open_device(settings.platform) as runtime:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
        model = model.to(runtime.device).eval()
        # No token is the end of a text.
        wanted = GenerationConfig(max_new_tokens=length, do_sample=False, eos_token_id=-1, pad_token_id=0)
        # Others find no prefixes in their caches, either. What a version of transformers does not know is left away.
        values = {"allow_block_sharing": False} | ({"num_blocks": 16, "max_batch_tokens": 64} if settings.quick else {})
        known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        config = ContinuousBatchingConfig(**{key: value for key, value in values.items() if key in known})
        options = {
            "generation_config": wanted,
            "continuous_batching_config": config,
            "persistent_manager": True,
        }
        seconds = 0.0
        for _ in range(2):
            runtime.synchronize()
            begin = time.perf_counter()
            found = model.generate_batch(inputs=prompts, **options)
            runtime.synchronize()
            seconds = time.perf_counter() - begin
        model.destroy_cached_continuous_batching_manager()
    tokens = sum(len(output.generated_tokens) for output in found.values())
    title = f"{name}: transformers, continuous batching"
    if tokens < len(prompts) * length:
        note = f"{tokens} tokens were made, {len(prompts) * length} asked for"
        result_log.add(Row("bench", item, title, FAILED, {"elapsed_time": seconds}, note))
        return
    figures: dict[str, float | int] = {
        "num_requests": len(prompts),
        "elapsed_time": seconds,
        "output_tokens_per_second": tokens / seconds,
    }
    ours = result_log.figures("bench", f"{name}: the same as transformers").get("output_tokens_per_second")
    if isinstance(ours, float):
        figures["ours_to_it"] = ours / figures["output_tokens_per_second"]
    result_log.add(Row("bench", item, title, MEASURED, figures, f"{length} output tokens each; attention: sdpa"))
