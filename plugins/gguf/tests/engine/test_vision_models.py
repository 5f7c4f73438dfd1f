"""GGUF files of vision models, whose encoders are in another file: they are their language models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plugins.gguf.tests.written_files import make_folder, write_gguf
from safetensors.torch import load_file, save_file

from mvllm import SamplingParams
from mvllm.errors import RequestError
from mvllm_gguf.header import read_gguf
from mvllm_gguf.model_config import model_config
from tests.helpers.multimodal_suite import NUM_TOKENS, engine, oracle


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "model_type"), [("qwen2_5_vl", "qwen2"), ("qwen3_vl", "qwen3")])
def test_a_file_of_a_vision_model_is_its_language_part(name: str, model_type: str, tmp_path: Path) -> None:
    expected = oracle(name)
    text, architecture = tmp_path / "text", f"{model_type}vl"
    text.mkdir()
    config = json.loads((expected.folder / "config.json").read_text())["text_config"]
    (text / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    tensors = load_file(expected.folder / "model.safetensors")
    language = {key.replace("model.language_model.", "model."): each for key, each in tensors.items()}
    save_file({key: each for key, each in language.items() if "visual" not in key}, text / "model.safetensors")
    sections = {f"{architecture}.rope.dimension_sections": [2, 3, 3, 0]}
    file = write_gguf(text, tmp_path / "model.gguf", architecture=architecture, extra=sections)
    folder = make_folder(file, tmp_path / "gguf", model_config(read_gguf(file)))
    with engine(folder, skip_tokenizer_init=True) as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
        for index in (0, 3):
            ids = expected.prompt_ids(expected.requests[index])
            [output] = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
            expected.check(index, output.outputs[0].token_ids)
        with pytest.raises(RequestError, match=r"text only|only text"):
            image = {"prompt_token_ids": [5], "multi_modal_data": {"image": expected.requests[1].images[0]}}
            llm.generate([image], params, use_tqdm=False)
