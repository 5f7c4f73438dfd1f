"""Decode steps and prompts of models of several kinds, the sampler, and a server: each item a minute at most.

What bench.py measures of three models in full is measured here in short, of more kinds of models. Those other than
Llama-3.1-8B have fewer layers than published (models.py), so that they are written and loaded within seconds.

    of_bandwidth   bytes of the weights that a step reads (of experts those that uniform routing is expected to use;
                   without keys and values) over the rate of a copy or reduction, as a share of the step's time
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.gpu import bench
from tests.gpu.models import BFLOAT16, CONFIGS, RANDOM_ONLY, Size, checkpoint_bytes, prepare_model
from tests.gpu.result_log import MEASURED, ResultLog, Row
from tests.gpu.settings import Item, Settings

if TYPE_CHECKING:
    from mvllm import LLM

DENSE = "llama-3.1-8b"
LARGE = (
    DENSE,
    "qwen3-30b-a3b-16-layers",
    "qwen3-8b-awq-8-layers",
    "qwen3-8b-fp8-8-layers",
    "gpt-oss-20b-8-layers",
    "deepseek-v2-lite-6-layers",
    "qwen3-next-80b-a3b-4-layers",
)
TINY = ("tiny", "tiny-experts", "tiny-awq", "tiny-fp8", "tiny-mxfp4", "tiny-mla", "tiny-hybrid")
NEEDS = {DENSE: 45.0, "qwen3-30b-a3b-16-layers": 45.0}
"""Seconds of models of 16 GB; the others need 25."""
QUICK = replace(bench.QUICK, batches=(1, 2), prompts=(24,), steps=2, served=3)
"""Less than bench.py's: an interpreter of kernels takes seconds for a step."""
PLAN = bench.Plan(batches=(1, 64), steps=32, prompts=(2048, 8192), rates=(8.0,), served=64)
SAMPLED = (1, 64, 256)  # rows
SAMPLER, SERVING = "sampler", "serving"


def items(settings: Settings) -> list[Item]:
    """Models, the sampler, the server. Quick runs have tiny models in their place."""
    obstacle = ""
    if settings.on_host:
        obstacle = f"needs a device: platform {settings.platform} runs on the host"
    elif settings.quick:
        obstacle = "left out by --quick"
    tiny = [Item(name, 10, 300) for name in TINY] if settings.quick else []
    large = [Item(name, NEEDS.get(name, 25.0), 120, obstacle=obstacle) for name in LARGE]
    # The server is started while the weights of the first model are there.
    serving = Item(SERVING, 30, 300 if settings.quick else 150)
    return [*tiny[:1], *large[:1], serving, *tiny[1:], *large[1:], Item(SAMPLER, 5, 120)]


def run(item: str, settings: Settings, result_log: ResultLog) -> None:
    """See the module."""
    if item == SAMPLER:
        _sampler(settings, result_log)
    elif item == SERVING:
        _serving(settings, result_log)
    else:
        _model(item, settings, result_log)


def _plan(settings: Settings) -> bench.Plan:
    return QUICK if settings.quick else PLAN


def _model(name: str, settings: Settings, result_log: ResultLog) -> None:
    limits, plan, config = bench.ceilings(settings, result_log), _plan(settings), CONFIGS[name]
    folder, load_format = prepare_model(name, settings.scratch / "models")
    plain = "quantization_config" not in config and config["model_type"] not in RANDOM_ONLY
    begin = time.perf_counter()
    with bench.open_engine(name, folder, load_format, settings, plan) as llm:
        start = {"start_s": time.perf_counter() - begin}
        result_log.add(Row("speed", name, f"{name}: start", MEASURED, start, str(llm.llm_engine.cache_summary)))
        for batch in plan.batches:
            if plain:
                figures, note = bench.measure_decode(llm, batch, plan, Size.of(config), limits)
            else:
                figures, note = _decode(llm, batch, plan, config, settings, result_log)
            result_log.add(Row("speed", name, f"{name}: decode, batch {batch}", MEASURED, figures, note))
        for length in plan.prompts:
            if plain:
                figures, note = bench.measure_prompt(llm, length, Size.of(config), limits[1])
            else:
                seconds = bench.prompt_seconds(llm, length, config["vocab_size"])
                figures, note = {"ms": seconds * 1e3, "tokens_s": length / seconds}, ""
            result_log.add(Row("speed", name, f"{name}: prompt of {length}", MEASURED, figures, note))


def _decode(
    llm: LLM, batch: int, plan: bench.Plan, config: dict[str, Any], settings: Settings, result_log: ResultLog
) -> tuple[dict[str, float], str]:
    """Decode steps of a quantized, MLA or hybrid model."""
    for _ in bench.decoding_steps(llm, batch, plan.context, 4, config["vocab_size"]):
        pass  # what is compiled late is compiled now
    seconds, context = bench.decode_seconds(llm, batch, plan, config["vocab_size"])
    figures = {"step_ms": seconds * 1e3, "tokens_s": batch / seconds}
    if config["model_type"] not in RANDOM_ONLY:
        figures["of_bandwidth"] = step_bytes(config, batch) / _read_rate(settings, result_log) / seconds
    return figures, f"context {context:.0f}"


def step_bytes(config: dict[str, Any], batch: int) -> float:
    """Bytes of the stored weights that a decode step of `batch` requests is expected to read."""
    everything = checkpoint_bytes(config, without="embed_tokens")
    dense = checkpoint_bytes(config, without=".experts.") - BFLOAT16 * config["vocab_size"] * config["hidden_size"]
    num_experts = config.get("num_experts") or config.get("num_local_experts") or 1
    touched = 1 - (1 - config.get("num_experts_per_tok", 1) / num_experts) ** batch
    return dense + (everything - dense) * touched


def _read_rate(settings: Settings, result_log: ResultLog) -> float:
    """Bytes per second: of a copy, or of reading alone."""
    copied = bench.ceilings(settings, result_log)[0]
    return max(copied, float(result_log.figures("bench", "ceilings").get("read_gb_s") or 0) * 1e9)


def _sampler(settings: Settings, result_log: ResultLog) -> None:
    """The engine's sampler with the host's part of it: greedy, with a temperature, and with top-k and top-p, too."""
    import numpy as np
    import torch

    from mvllm.messages.sampling_params import SamplingParams
    from mvllm.sampling.sampler import Sampler
    from mvllm.sampling.sampling_state import SamplingState
    from mvllm.sampling.token_history import TokenHistory
    from tests.gpu.device import open_device, seconds_of

    ways: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0},
        "temperature": {"temperature": 0.8},
        "top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    }
    vocabulary = 320 if settings.quick else 151936
    with open_device(settings.platform) as runtime:
        for rows in (4,) if settings.quick else SAMPLED:
            logits = runtime.empty((rows, vocabulary), torch.float32).normal_(0, 3)
            for way, given in ways.items():
                state, history = SamplingState(rows, vocabulary, 0), TokenHistory(rows, 8)
                for row in range(rows):
                    params = SamplingParams(**given)
                    history.set_row(row, [1, 2, 3], 3)
                    state.set_row(row, params, eos_token_ids=[], request_id=f"{way} {row}", num_prompt_tokens=3)
                sampler, slots = Sampler(), np.arange(rows)
                with runtime.inference_mode():
                    work = partial(sampler.sample, logits, slots, state, history)
                    seconds = seconds_of(runtime, work, calls=2 if settings.quick else 20)
                name = f"sampler, {rows} rows, {way}"
                result_log.add(Row("speed", SAMPLER, name, MEASURED, {"us": seconds * 1e6}, f"{vocabulary} token ids"))


def _serving(settings: Settings, result_log: ResultLog) -> None:
    from tests.gpu.serving import measure_serving

    name = "tiny" if settings.quick else DENSE
    folder, _ = prepare_model(name, settings.scratch / "models")
    measure_serving(name, folder, SERVING, _plan(settings), settings, result_log, part="speed")
