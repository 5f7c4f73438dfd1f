"""Programs started in unusual conditions: without standard streams, in a deleted folder, with unusual paths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import TAG, assert_nothing_left, new_tag, shared_memory_names

PROGRAM = """
import json, os, pathlib, shutil, sys
from mvllm import LLM, SamplingParams

model, result, odd, settings = *sys.argv[1:4], json.loads(sys.argv[4])
if odd == "gone":
    sys.path.insert(0, "")
    import torch, transformers.utils  # which need a working directory when they are loaded
    torch.ones(64, 64) @ torch.ones(64, 64)
    shutil.rmtree(os.getcwd())
elif odd == "path object":
    sys.path.append(pathlib.Path("/somewhere"))
with LLM(model, dtype="float32", kv_cache_memory_bytes=1 << 22, skip_tokenizer_init=True, **settings) as llm:
    [output] = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
pathlib.Path(result).write_text(json.dumps(list(output.outputs[0].token_ids)))
"""

CLOSED = {"no stdin": "0<&-", "no stdout": "1>&-", "no stderr": "2>&-", "no streams": "0<&- 1>&- 2>&-"}
SETTINGS = {
    "uni": {},
    "mp": {"tensor_parallel_size": 2},
    "core": {"engine_core_process": True, "distributed_executor_backend": "mp"},
}


@pytest.mark.parametrize(
    ("odd", "engine"),
    [
        ("no streams", "core"),
        *(
            pytest.param(*one, marks=pytest.mark.exhaustive)  # one stream is less unusual than none
            for one in [
                *(("", "uni"), ("no streams", "mp"), ("no stdout", "core"), ("no stdout", "mp")),
                *(("no stdin", "core"), ("no stderr", "mp"), ("gone", "core"), ("path object", "core")),
            ]
        ),
    ],
)
def test_a_model_runs_in_unusual_conditions(checkpoint: Path, tmp_path: Path, odd: str, engine: str) -> None:
    tag, before = new_tag(), shared_memory_names()
    folder = tmp_path / "here"
    folder.mkdir()
    result = tmp_path / "result"
    program = [sys.executable, "-c", PROGRAM, str(checkpoint), str(result), odd, json.dumps(SETTINGS[engine])]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {CLOSED.get(odd, "")}', "sh", *program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), TAG: tag},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(result.read_text())) == 4
    assert_nothing_left(tag, before)
