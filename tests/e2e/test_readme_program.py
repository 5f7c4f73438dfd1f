"""The program in README.md runs unchanged, next to a model folder with the name that it uses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.model_zoo import make_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def program() -> str:
    return first_program(ROOT / "README.md")


def first_program(page: Path) -> str:
    """The first Python block of a page."""
    [first, *_] = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return str(first)


def test_it_uses_the_api_of_vllm(program: str) -> None:
    for line in (
        "from mvllm import LLM, SamplingParams",
        'llm = LLM(model="path-or-name")',
        'outputs = llm.generate(["Have you heard of paged attention?", "The capital of"], '
        "SamplingParams(temperature=0.8, top_k=50))",
        'print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")',
    ):
        assert line in program


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program, encoding="utf-8")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "program.py"]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran


def test_it_prints_each_prompt_with_a_text(program: str, tmp_path: Path) -> None:
    make_checkpoint("llama-gqa", tmp_path / "path-or-name")
    ran = run(program, tmp_path)
    first, second = ran.stdout.splitlines()
    assert re.fullmatch(r"Prompt: 'Have you heard of paged attention\?', Generated text: ['\"].*['\"]", first)
    assert re.fullmatch(r"Prompt: 'The capital of', Generated text: ['\"].*['\"]", second)
    assert "KV cache: " in ran.stderr and "concurrent requests" in ran.stderr
