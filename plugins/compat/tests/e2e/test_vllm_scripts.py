"""Scripts as vLLM's basic examples call it run on mvllm: only their imports and their models have changed.

docs/how-to/coming-from-other-engines.md lists them, and the two whose API mvllm does not have.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.helpers import encoder_zoo

SCRIPTS = Path(__file__).parent / "vllm_scripts"
PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "coming-from-other-engines.md"

EXPECTED = {
    "basic": r"Prompt: 'Once upon a time', Generated text: '.+'",
    "generate": r"Prompt: 'The capital of France is'\nGenerated text: ' Paris",
    "chat": r"(Generated text: 'The capital of Japan is Tokyo\.'\n-+\n)(Generated text: 'The .*Tokyo\.'\n){3}",
    "classify": r"Class Probabilities: \[0\.\d+, 0\.\d+, 0\.\d+\] \(size=3\)",
    "embed": r"Embeddings: \[.+, \.\.\., .+\] \(size=192\)",
    "reward": r"Reward: \[-?\d.*\] \(size=1\)",
    "score": r"Pair: 'The capital of Brazil is Brasilia\.'\nScore: 0\.\d+\n",
    "async_llm_streaming": r"(?s)Response:.+\nGeneration complete\n.*Response:.+\nGeneration complete",
    "llm_engine_example": r"(?s)(RequestOutput.*){3}",
    "structured_outputs": r"Choice: (Positive|Negative)\n.*Regex: \w+@\w+\.com\n.*JSON: \{\s*\"car_type\"[\s\S]*"
    r"Grammar: SELECT col_[12]  from table_[12] ",
    "metrics": r"(?s)mvllm:generation_tokens \(counter\) = [1-9].*latency_seconds \(histogram\)\n +sum = [^\n]*\n"
    r" +count = 2\n",
    "simple_profiling": r"Prompt: 'Once upon a time', Generated text: '.+'",
    "custom_request_logits_processor": r"Output: \[100, 100, 100, 100\] .*\nOutput: \[(?!100).*' Paris",
}
ARGUMENTS = {
    "generate": ["--max_tokens=4", "--temperature", "0", "--swap-space", "4"],
    "chat": ["--max-tokens", "16", "--temperature=0", "--max_model_len", "256"],
    "llm_engine_example": ["--model", "demo"],
}
ENCODER_LABELS = {"classify": 3, "reward": 1, "score": 1}


def test_every_script_is_run_here() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.py")} == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_a_script_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ARGUMENTS.get(name, [])
    if name in ENCODER_LABELS:
        model = encoder_zoo.checkpoint("BertForSequenceClassification", labels=ENCODER_LABELS[name], tokenizer=True)
        arguments = ["--model", str(model)]
    script = SCRIPTS / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(EXPECTED[name], printed), printed
    if name == "simple_profiling":
        assert list((tmp_path / "mvllm_profile").glob("*.trace.json"))
