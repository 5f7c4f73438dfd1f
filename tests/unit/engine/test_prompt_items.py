"""Items of several prompts are prepared at the same time."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from mvllm.config.multimodal import MultiModalConfig
from mvllm.engine.frontend.input_processor import InputProcessor
from mvllm.engine.frontend.prompt_items import PromptItems
from mvllm.errors import RequestError

CONFIG: Any = SimpleNamespace(multimodal=MultiModalConfig())


class Client:
    """Finishes the prompts when the last of `num_prompts` has come, or fails that of the content `bad`."""

    def __init__(self, num_prompts: int) -> None:
        self.num_prompts = num_prompts
        self.futures: dict[str, Future[list[str]]] = {}

    def submit(self, prompt: Any) -> Future[list[str]]:
        name = prompt["multi_modal_data"]["image"]
        future = self.futures[name] = Future()
        if len(self.futures) == self.num_prompts:
            for each, waiting in self.futures.items():
                waiting.set_exception(RequestError("bad")) if each == "bad" else waiting.set_result([each])
        return future


def prompts(*names: str) -> list[Any]:
    return [{"prompt": "a", "multi_modal_data": {"image": name}} for name in names]


def test_every_prompt_is_submitted_before_the_first_is_awaited() -> None:
    items = PromptItems(CONFIG, Client(3))  # type: ignore[arg-type]
    given = [*prompts("x", "y"), "text", *prompts("z")]
    assert items.prepare_all(given, InputProcessor._check_for_prompt) == [["x"], ["y"], (), ["z"]]


def test_an_error_names_its_prompt() -> None:
    client = Client(3)
    items = PromptItems(CONFIG, client)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="Prompt 1 of 3: bad"):
        items.prepare_all(prompts("x", "bad", "y"), InputProcessor._check_for_prompt)
