"""The program in README.md works as it stands: it is run unchanged, beside a model folder of the name that it uses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.model_zoo import make_checkpoint

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def program() -> str:
    """The first Python block of the page."""
    [first, *_] = re.findall(
        r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    return str(first)


def test_it_is_what_users_of_this_field_know(program: str) -> None:
    for line in (
        "from mvllm import LLM, SamplingParams",
        'llm = LLM(model="path-or-name")',
        'outputs = llm.generate(["Have you heard of paged attention?", "The capital of"], '
        "SamplingParams(temperature=0.8, top_k=50))",
        'print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")',
    ):
        assert line in program


def test_it_prints_each_prompt_with_a_text(program: str, tmp_path: Path) -> None:
    make_checkpoint("llama-gqa", tmp_path / "path-or-name")
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    first, second = ran.stdout.splitlines()
    assert re.fullmatch(r"Prompt: 'Have you heard of paged attention\?', Generated text: ['\"].*['\"]", first)
    assert re.fullmatch(r"Prompt: 'The capital of', Generated text: ['\"].*['\"]", second)
    assert "KV cache: " in ran.stderr and "concurrent requests" in ran.stderr
