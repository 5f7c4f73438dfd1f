"""Runs an engine of two ranks with a small /dev/shm; prints the result as one line of JSON.

    python small_memory_program.py CHECKPOINT PROMPTS [--without-anonymous-memory]

PROMPTS is JSON: lists of token ids. The option forbids memfd_create in every process, as some sandboxes do, so that
shared memory must come from /dev/shm.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

FORBID = """
import os
def memfd_create(*args, **kwargs):
    raise PermissionError(1, "Operation not permitted")
os.memfd_create = memfd_create
"""


def used_bytes() -> int:
    stat = os.statvfs("/dev/shm")
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def main(folder: str, prompts: list[list[int]]) -> dict[str, object]:
    from mvllm import LLM, SamplingParams

    try:
        llm = LLM(
            folder,
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
            dtype="float32",
            max_model_len=128,
            kv_cache_memory_bytes=1 << 22,
            max_logprobs=100,
            use_tqdm_on_load=False,
        )
    except Exception as e:
        return {"refusal": f"{type(e).__name__}: {e}", "used": used_bytes()}
    with llm:
        # The log-probabilities of all prompts together are larger than the slots of the reduced ring.
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, prompt_logprobs=100, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        found = {"tokens": [list(output.outputs[0].token_ids) for output in outputs], "while": used_bytes()}
    return {**found, "used": used_bytes()}


if __name__ == "__main__":
    if "--without-anonymous-memory" in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "sitecustomize.py").write_text(FORBID)
            path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
            arguments = [argument for argument in sys.argv if argument != "--without-anonymous-memory"]
            status = os.spawnve(
                os.P_WAIT, sys.executable, [sys.executable, *arguments], {**os.environ, "PYTHONPATH": path}
            )
        sys.exit(status)
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
