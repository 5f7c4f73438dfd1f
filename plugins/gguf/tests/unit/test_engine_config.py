"""A GGUF file as `model`: the engine's configuration comes from its metadata."""

from __future__ import annotations

import json

from plugins.gguf.tests.fuzz.gguf_files import make_models

from mvllm.config.engine_args import EngineArgs


def test_configuration_and_tokenizer_are_those_of_the_file(tmp_path):
    path = tmp_path / "tiny-Q4_0.gguf"
    path.write_bytes(make_models()[0].encode())
    for name in (str(path), str(tmp_path), f"{tmp_path}:q4_0"):
        config = EngineArgs.from_kwargs(model=name).create_engine_config().model
        assert (config.model, config.architecture, config.num_layers) == (name, "MistralForCausalLM", 1)
    assert config.tokenizer == str(config.path)
    vocabulary = json.loads((config.path / "tokenizer.json").read_text())["model"]["vocab"]
    assert "Ġa" in vocabulary and vocabulary["the"] == 257
    [file] = json.loads((config.path / "gguf_files.json").read_text())["files"]
    assert file["path"] == str(path)
