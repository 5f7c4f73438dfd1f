"""Token spaces of models that run as graphs equal transformers."""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from pathlib import Path

import pytest
from plugins.graph.tests.interpreter_engine import start
from plugins.graph.tests.interpreter_platform import graph_platform_path

from mvllm import SamplingParams
from tests.helpers.plugins import prepend
from tests.helpers.thread_executor import ThreadExecutor

make_janus = importlib.import_module("plugins.image-generation.tests.image_zoo").make_janus
spaces = importlib.import_module("plugins.image-generation.tests.engine.test_token_spaces")

THREADS = f"{ThreadExecutor.__module__}.{ThreadExecutor.__qualname__}"


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepend(monkeypatch, graph_platform_path(tmp_path))


@pytest.mark.exhaustive
@pytest.mark.parametrize("tensor", [1, 2])
def test_images_and_text_have_heads_of_their_own(stack: ExitStack, tmp_path: Path, tensor: int) -> None:
    folder = make_janus(tmp_path / "janus", grid=4)
    wanted, prompts = spaces.Oracle(folder), spaces.prompts_of(1)
    sizes = {"tensor_parallel_size": 2, "distributed_executor_backend": THREADS} if tensor > 1 else {}
    llm = start(stack, folder, **sizes)
    text = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    given = [{"prompt_token_ids": ids} for ids in (prompts[2], prompts[3])]
    image, words = llm.generate(given, [spaces.image_params(), text], use_tqdm=False)
    assert image.outputs[0].image_codes == wanted.codes(prompts[2], prompts[2], 1.0)
    assert list(words.outputs[0].token_ids) == wanted.text(prompts[3], 10)
