"""`mvllm chat` with a published model: its template, a conversation, and the second start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mvllm import LLM, SamplingParams
from tests.published.conftest import SIZES, Published

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def test_a_conversation_is_rendered_as_the_file_says(smollm2: Published) -> None:
    with LLM(str(smollm2.path), **SIZES, use_tqdm_on_load=False) as llm:
        conversation = [
            {"role": "user", "content": "What is the capital of France?"},
            {"role": "assistant", "content": "Paris."},
            {"role": "user", "content": "  And of Italy? "},
        ]
        [output] = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
        rendered = llm.get_tokenizer().decode(output.prompt_token_ids)
    assert rendered == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\nParis.<|im_end|>\n<|im_start|>user\n  And of Italy? <|im_end|>\n<|im_start|>assistant\n"
    )
    answer = output.outputs[0]
    assert "Rome" in answer.text and answer.finish_reason == "stop" and "<|" not in answer.text


def _chat(model: Published, lines: str, cache: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "mvllm"), "chat", "--model", str(model.path), "--temperature", "0"]
    command += ["--max-tokens", "64", "--dtype", "float32", "--max-model-len", "512"]
    ran = subprocess.run(
        [*command, "--kv-cache-memory-bytes", str(2**26)],
        input=lines,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "MVLLM_CACHE_DIR": str(cache)},
    )
    assert ran.returncode == 0, ran.stderr
    return ran


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    found = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    return {str(path): (state.st_ino, state.st_mtime_ns) for path, state in found.items()}


def test_two_turns_and_a_second_start_that_derives_nothing(smollm2: Published, tmp_path: Path) -> None:
    first = _chat(smollm2, "What is the capital of France?\nHow many people live there?\n", tmp_path)
    assert "Paris" in first.stdout.splitlines()[0] and "million" in first.stdout
    assert "Wrote configuration and tokenizer" in first.stderr
    derived = _files(tmp_path)
    assert derived
    second = _chat(smollm2, "What is the capital of France?\n", tmp_path)
    assert first.stdout.startswith(second.stdout.rstrip())
    assert "Wrote configuration and tokenizer" not in second.stderr
    assert _files(tmp_path) == derived
