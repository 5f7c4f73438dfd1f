"""Peak memory of an engine on a graph platform: python -m plugins.graph.tests.peak_memory FOLDER PLATFORM

Prints a line of JSON: the peak resident bytes of this process, which has the worker, and of its compiler processes; and
some tokens.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from mvllm import LLM, SamplingParams
from mvllm_graph.program_process import compiler_pids


def peak(pid: int) -> int:
    """VmHWM of a process in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def main(folder: str, platform: str) -> None:
    """Generates with one engine in this process."""
    settings = {"max_model_len": 64, "max_num_seqs": 2, "kv_cache_memory_bytes": 1 << 22, "skip_tokenizer_init": True}
    with LLM(folder, platform=platform, dtype="float32", distributed_executor_backend="uni", **settings) as llm:
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
        [output] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        compiler = sum(peak(pid) for pid in compiler_pids())
    tokens = list(output.outputs[0].token_ids)
    print(json.dumps({"worker": peak(os.getpid()), "compiler": compiler, "tokens": tokens}))


if __name__ == "__main__":
    main(*sys.argv[1:])
