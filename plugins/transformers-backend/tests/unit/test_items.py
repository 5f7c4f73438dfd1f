"""Items of models that run through transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mvllm.config.hf_config import HFConfig
from mvllm.config.multimodal import MultiModalModel
from mvllm.errors import RequestError
from mvllm.multimodal.item_families import item_family


def family(architecture: str = "AcmeForConditionalGeneration", **processor: Any) -> Any:
    model = MultiModalModel({"image": 9}, embedding_width=4, by_transformers=True)
    made = SimpleNamespace(**{"unused_input_names": ["num_patches"], **processor})
    return item_family(architecture, made, model, HFConfig({}, "config.json"))


def test_encoders_get_all_features_and_the_token_ids_of_the_span() -> None:
    features = {"pixel_values": np.zeros(2), "pixel_attention_mask": np.ones(2), "num_patches": [1]}
    for architecture in ("AcmeForConditionalGeneration", "Idefics3ForConditionalGeneration"):
        found = family(architecture).encoder_inputs("image", features, [9, 4, 9])
        assert found.keys() == {"pixel_values", "pixel_attention_mask", "input_ids"}
        assert found["input_ids"].tolist() == [9, 4, 9] and found["input_ids"].dtype == np.int64


def no_text(**settings: Any) -> None:
    raise NotImplementedError


@pytest.mark.parametrize(
    "processor",
    [
        {"image_token": None},
        {"image_token": "<image>", "prepare_inputs_layout": no_text},
    ],
)
def test_processors_that_do_not_say_which_text_replaces_an_item_are_refused(processor: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="SimpleNamespace does not say which text replaces an item"):
        family(**processor).process("image", None, {})
