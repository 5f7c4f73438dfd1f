"""An LLM with a scripted engine core."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.engine.builders import Answer, FakeClient
from tests.unit.engine.tokenizers import TEMPLATE, make_tokenizer, save_tokenizer

TOKENIZER = make_tokenizer(chat_template=TEMPLATE)
ANSWER_TEXT = "The cat sat on the mat."
ANSWER = TOKENIZER.encode(ANSWER_TEXT)


def save_model_folder(folder: Path, chat_template: str | None = TEMPLATE, kind: str = "byte_level") -> str:
    """Writes a model folder without weights. Its tokenizer is of a kind of `tests.unit.engine.tokenizers`."""
    save_tokenizer(folder, kind, chat_template)
    tokenizer = TOKENIZER if kind == "byte_level" else make_tokenizer(kind)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.length,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": tokenizer.eos_token_id,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def use_fake_engine(monkeypatch, answer: Answer = lambda request: ANSWER) -> list[FakeClient]:
    """Makes new engines use a FakeClient; the returned list collects the clients."""
    clients: list[FakeClient] = []

    def make_client(config, chosen, meanwhile=lambda config: None):
        meanwhile(config)
        clients.append(FakeClient(config, answer))
        return clients[-1]

    monkeypatch.setattr("mvllm.engine.llm_engine.make_client", make_client)
    monkeypatch.setattr("mvllm.engine.frontend.engine_frontend.choose_platform", lambda name: None)
    return clients


def echo(request):
    """A response that repeats the prompt, to distinguish requests."""
    return list(request.prompt_token_ids)
