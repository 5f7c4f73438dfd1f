"""Runner of mvllm, offline, with the engine in this process (or with a worker per rank).

Every `--option=NAME=JSON` is a setting of the engine, and overrides those that this program passes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from protocol import Generate, Unavailable, imports_done, serve


def load(args: argparse.Namespace) -> tuple[Generate, str, str]:
    import torch  # noqa: F401  (the engine imports it later)

    import mvllm
    import mvllm.engine.llm_engine
    from mvllm import LLM, SamplingParams
    from mvllm.config.engine_args import EngineArgs

    imports_done()
    options = dict(option.split("=", 1) for option in args.option)
    is_quantized = options.pop("checkpoint", None) == "quantized"
    settings = {name: json.loads(value) for name, value in options.items()}
    if args.precision in ("int8", "int4"):  # a GGUF file names its own formats
        if "quantization" not in {field.name for field in dataclasses.fields(EngineArgs)}:
            raise Unavailable("this version has no quantization")
        if not is_quantized:
            settings["quantization"] = args.precision
    ranks = settings.get("tensor_parallel_size", 1)
    defaults = {
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": args.kv_bytes // ranks,
        "max_model_len": args.max_len,
    }
    llm = LLM(model=str(args.model), use_tqdm_on_load=False, **(defaults | settings))

    def generate(prompts: list, output: int, shared: int) -> list:
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    return (
        generate,
        mvllm.__version__,
        "defaults" if not settings else ", ".join(f"{k}={v}" for k, v in settings.items()),
    )


if __name__ == "__main__":
    serve(load)
