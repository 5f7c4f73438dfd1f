"""A worker imports only the modules that it needs: each worker process pays for its imports at startup."""

from __future__ import annotations

import subprocess
import sys

WORKER_PROGRAM = """
import sys
from mvllm import LLM, SamplingParams
with LLM("demo", skip_tokenizer_init=True, distributed_executor_backend="uni", kv_cache_memory_bytes=2**22) as llm:
    params = SamplingParams(temperature=0.5, max_tokens=3, detokenize=False, logprobs=1)
    [output] = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
assert len(output.outputs[0].token_ids) == 3
needless = {"transformers", "huggingface_hub", "tokenizers", "jinja2", "zmq", "multiprocessing.pool", "torch._dynamo"}
if loaded := needless & set(sys.modules):
    sys.exit(f"loaded {sorted(loaded)}")
with LLM("demo", kv_cache_memory_bytes=2**22) as llm:  # with a tokenizer, in this process, too
    assert llm.generate("Once upon", SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].text
sys.exit("loaded zmq" if "zmq" in sys.modules else 0)
"""


def test_a_worker_that_loads_and_runs_a_model_imports_no_library_for_text_or_the_hub() -> None:
    """In one process with the engine, which has no tokenizer here: a separate worker imports even less.

    An engine in one process needs no sockets, with a tokenizer either.
    """
    command = [sys.executable, "-c", WORKER_PROGRAM]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
