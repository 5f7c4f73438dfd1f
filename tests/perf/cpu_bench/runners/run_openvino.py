"""Runner of OpenVINO GenAI: its pipeline with continuous batching and prefix caching.

Requests that arrive together do not reuse each other's prefixes there. If prompts share a prefix, the first request
runs alone, which is faster.
"""

from __future__ import annotations

import argparse

from protocol import Generate, serve


def load(args: argparse.Namespace) -> tuple[Generate, str, str]:
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = max(1, args.kv_bytes >> 30)
    scheduler.enable_prefix_caching = True
    scheduler.max_num_batched_tokens = 2048
    scheduler.dynamic_split_fuse = True
    properties = {
        "INFERENCE_NUM_THREADS": args.threads,
        "INFERENCE_PRECISION_HINT": "bf16",
        "PERFORMANCE_HINT": "LATENCY",
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(args.model), scheduler, "CPU", properties)

    def batch(prompts: list, output: int) -> list:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output, True, False
        tensors = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        return [list(r.m_generation_ids[0]) for r in pipeline.generate(tensors, [config] * len(tensors))]

    def generate(prompts: list, output: int, shared: int) -> list:
        if not shared:
            return batch(prompts, output)
        return batch(prompts[:1], output) + batch(prompts[1:], output)

    return generate, openvino_genai.__version__, "continuous batching, its default KV precision"


if __name__ == "__main__":
    serve(load)
