"""Models with encoders whose weights change, or whose language part is quantized."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mvllm import SamplingParams
from mvllm.errors import ModelError, RequestError
from mvllm.gguf.header import read_gguf
from mvllm.gguf.model_config import model_config
from tests.engine.test_items_in_tiers import FAMILIES, num_encoded
from tests.helpers.changed_weights import changed_copy, tensors_of
from tests.helpers.float8_zoo import FLOAT8_SCHEMES, quantize_to_float8
from tests.helpers.gguf_files import make_folder, write_gguf
from tests.helpers.multimodal_suite import NUM_TOKENS, MultiModalOracle, check, engine, generate, oracle
from tests.helpers.quantized_zoo import SCHEMES, quantize

ENCODERS = re.compile("vision|visual|projector")
"""Finds names of tensors and modules of encoders."""


def with_other_encoders(expected: MultiModalOracle, folder: Path) -> MultiModalOracle:
    """A copy of a checkpoint with the same language model and other encoders."""
    changed_copy(expected.folder, folder, seed=2)
    old, new = (load_file(each / "model.safetensors") for each in (expected.folder, folder))
    kept = {name: (new if ENCODERS.search(name) else old)[name] for name in old}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return MultiModalOracle(expected.name, expected.entry, folder, expected.requests)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*FAMILIES, "llava-through", "llava_next-through"])
def test_images_are_encoded_again_with_new_weights_and_after_sleep(name: str, tmp_path: Path) -> None:
    expected = oracle(name)
    changed = with_other_encoders(expected, tmp_path / "changed")
    tensors = {key: tensor for key, tensor in tensors_of(changed.folder).items() if ENCODERS.search(key)}
    with engine(expected.folder, model_impl=expected.entry.model_impl) as llm:

        def check_all(answers: MultiModalOracle, *, encodes: int) -> None:
            before = num_encoded(llm)
            outputs = generate(llm, answers.requests)
            check(answers, outputs)
            assert num_encoded(llm) - before == encodes

        check_all(expected, encodes=4)
        check_all(expected, encodes=0)
        llm.update_weights(tensors=tensors)
        check_all(changed, encodes=4)
        tokens = [generate(llm, [each])[0].outputs[0].token_ids for each in expected.requests[:2]]
        llm.update_weights(path=expected.folder)
        check_all(expected, encodes=4)
        again = [generate(llm, [each])[0].outputs[0].token_ids for each in expected.requests[:2]]
        assert tokens[0] == again[0] and tokens[1] != again[1]
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            check_all(expected, encodes=4)
        assert llm.reset_prefix_cache()
        check_all(expected, encodes=4)


INT4, INT8, AWQ = SCHEMES["w4a16"], SCHEMES["w8a16-rows"], SCHEMES["awq"]
FLOATS = "lm_head|vision|visual|projector"
COMPRESSED_IGNORES = ["lm_head", "re:.*vision_tower.*", "re:.*multi_modal_projector.*"]
QUANTIZED: dict[str, tuple[str, Any]] = {
    "int4": ("llava", dataclasses.replace(INT4, config={**INT4.config, "ignore": COMPRESSED_IGNORES}, floats=FLOATS)),
    "int8": (
        "gemma3-images",
        dataclasses.replace(INT8, config={**INT8.config, "ignore": COMPRESSED_IGNORES}, floats=FLOATS),
    ),
    "awq": (
        "qwen2_5_vl",
        dataclasses.replace(AWQ, config={**AWQ.config, "modules_to_not_convert": ["visual"]}, floats=FLOATS),
    ),
    "fp8": (
        "qwen3_vl",
        dataclasses.replace(
            FLOAT8_SCHEMES["ct-channel"],
            config={**FLOAT8_SCHEMES["ct-channel"].config, "ignore": ["re:.*visual.*", "lm_head"]},
            floats=FLOATS,
        ),
    ),
}


def quantized(name: str, how: Any, folder: Path) -> tuple[MultiModalOracle, Path]:
    """transformers with the rounded weights as floats, and the folder of the quantized checkpoint."""
    expected = oracle(name)
    plain = shutil.copytree(expected.folder, folder / "plain")
    write = quantize if hasattr(how, "pack") else quantize_to_float8
    made = write(how, folder, plain)
    return MultiModalOracle(name, expected.entry, plain, expected.requests), made.quantized


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_quantized_language_model_with_encoders_of_floats(kind: str, tmp_path: Path) -> None:
    name, how = QUANTIZED[kind]
    expected, folder = quantized(name, how, tmp_path)
    with engine(folder) as llm:
        check(expected, generate(llm, expected.requests))


@pytest.mark.exhaustive
def test_quantized_encoders_are_refused(tmp_path: Path) -> None:
    _, folder = quantized("llava", dataclasses.replace(SCHEMES["w8a16-rows"], floats="lm_head"), tmp_path)
    with pytest.raises(ModelError, match="vision_tower"), engine(folder):
        pass


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "model_type"), [("qwen2_5_vl", "qwen2"), ("qwen3_vl", "qwen3")])
def test_a_gguf_file_of_a_vision_model_is_its_language_part(name: str, model_type: str, tmp_path: Path) -> None:
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
