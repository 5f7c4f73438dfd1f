"""Models with encoders whose weights change, or whose language part is quantized."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mvllm.errors import ModelError
from tests.engine.test_items_in_tiers import FAMILIES, num_encoded
from tests.helpers.changed_weights import changed_copy, tensors_of
from tests.helpers.float8_zoo import FLOAT8_SCHEMES, quantize_to_float8
from tests.helpers.multimodal_suite import MultiModalOracle, check, engine, generate, oracle
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
@pytest.mark.parametrize("name", FAMILIES)
def test_images_are_encoded_again_with_new_weights_and_after_sleep(name: str, tmp_path: Path) -> None:
    check_other_encoders(oracle(name), tmp_path)


def check_other_encoders(expected: MultiModalOracle, tmp_path: Path) -> None:
    changed = with_other_encoders(expected, tmp_path / "changed")
    tensors = {key: tensor for key, tensor in tensors_of(changed.folder).items() if ENCODERS.search(key)}
    with engine(expected.folder, **expected.settings) as llm:

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
