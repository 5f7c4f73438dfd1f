"""Whole engines with torch_tpu on XLA's CPU device: tokens equal those of transformers.

Requires torch_tpu and the library of host_devices.py; skipped otherwise. Each engine has its own process, because torch
cannot unregister the device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from platforms.tpu.tests import host_devices

if reason := host_devices.missing_requirements():
    pytest.skip(reason, allow_module_level=True)

PROGRAM = """
import json, sys
from mvllm import LLM, SamplingParams
from mvllm.testing.zoo import Zoo
from pathlib import Path
from platforms.tpu.tests.host_devices import register_cumsum

register_cumsum()
expected = Zoo(Path(sys.argv[1])).oracle(sys.argv[2], (3, 11), 6)
settings = dict(platform="tpu", dtype="float32", skip_tokenizer_init=True, max_model_len=32, max_num_seqs=2,
                max_num_batched_tokens=16, kv_cache_memory_bytes=2**20, use_tqdm_on_load=False)
with LLM(str(expected.folder), **settings, enforce_eager=sys.argv[3] == "eager") as llm:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in expected.prompts], params, use_tqdm=False)
print(json.dumps([[list(output.outputs[0].token_ids) for output in outputs], expected.tokens]))
"""


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("family", ["llama"])
def test_tokens_equal_transformers(tmp_path, family, mode):
    repository = Path(__file__).parents[3]
    variables = {**os.environ, **host_devices.build(tmp_path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), family, mode]
    done = subprocess.run(command, cwd=repository, env=variables, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    found, expected = json.loads(done.stdout.splitlines()[-1])
    assert found == expected
