"""ImageParams checks every field when it is made, as SamplingParams does."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from mvllm import ImageParams, RequestError

WRONG: dict[str, list[Any]] = {
    "guidance_scale": ["x", -1, 1001, float("nan")],
    "n": [0, 1.5, True, None],
    "temperature": [-1, "hot", None],
    "top_k": [-2, "many"],
    "top_p": [0, 1.1],
    "seed": ["x", 2**63],
    "max_tokens": [-1, "x"],
    "height": [0, "x"],
    "width": [1 << 15, 2.5],
    "negative_prompt": [5, [], ["x"], [-1], "\ud800", np.array([])],
    "logprobs": ["x", 1, -1, 0.0, [True]],
    "decode": ["x", 1, None],
}


def test_there_are_wrong_values_of_every_field() -> None:
    assert list(WRONG) == [field.name for field in msgspec.structs.fields(ImageParams)]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_refused_with_the_name_of_its_field(name: str, value: Any) -> None:
    other = {"height": {"width": 8}, "width": {"height": 8}}.get(name, {})
    with pytest.raises(RequestError, match=f"^{name} must be ") as caught:
        ImageParams(**{name: value, **other})
    assert caught.value.parameter == name


def test_values_are_kept_as_sampling_params_keep_them() -> None:
    params = ImageParams(seed=-1, top_k=-1, negative_prompt=(3, 4), logprobs=0, guidance_scale=2)  # type: ignore[arg-type]
    assert (params.seed, params.top_k, params.negative_prompt, params.guidance_scale) == (None, 0, [3, 4], 2.0)
    assert params.returns_logprobs and not ImageParams(logprobs=False).returns_logprobs
    assert ImageParams(negative_prompt="").negative_prompt == "", "it is formatted, so that it is not empty"
