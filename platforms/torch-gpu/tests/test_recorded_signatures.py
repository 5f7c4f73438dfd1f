"""Calls of other libraries fit their signatures: FlashInfer's recorded ones, and torch's schema of cuDNN attention."""

from __future__ import annotations

import importlib
import inspect
import tomllib
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

importlib.import_module("platforms.torch-gpu.tests.interpreted")  # skips without Triton

from mvllm_torch_gpu import cudnn_attention  # noqa: E402

fakes = importlib.import_module("platforms.torch-gpu.tests.fake_attention_libraries")
signatures = importlib.import_module("platforms.torch-gpu.tests.flashinfer_signatures")


def test_the_signatures_are_those_of_the_pinned_version():
    project = tomllib.loads((Path(__file__).parents[2] / "cuda" / "pyproject.toml").read_text("utf-8"))
    assert (
        f"flashinfer-python=={signatures.recorded()['version']}"
        in (project["project"]["optional-dependencies"]["flashinfer"])
    )


@pytest.mark.parametrize("wrapper", signatures.MODULES)
@pytest.mark.parametrize("method", signatures.METHODS)
def test_the_replacements_of_flashinfer_have_its_parameters_at_the_same_places(wrapper, method):
    made = getattr(fakes.make_flashinfer([]), wrapper)
    replacement = inspect.signature(inspect.unwrap(vars(made)[method])).parameters
    real = signatures.signature(wrapper, method).parameters
    for place, (name, parameter) in enumerate(replacement.items()):
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        assert name in real, f"{wrapper}.{method} has no {name}"
        assert (parameter.kind, parameter.default) == (real[name].kind, real[name].default), name
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            assert list(real).index(name) == place, name


def test_a_call_with_a_parameter_that_flashinfer_does_not_have_is_refused():
    made = fakes.make_flashinfer([]).BatchPrefillWithPagedKVCacheWrapper(torch.empty(16, dtype=torch.uint8), "NHD")
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        made.plan(*[torch.zeros(2, dtype=torch.int32)] * 4, 4, 1, 64, 16, causal=True, scale=1.0)


class _Calls(TorchDispatchMode):
    """Records the operations of torch, with their arguments by name."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, function, types, args=(), options=None):
        arguments = function._schema.arguments  # those with the values of their defaults are left out of `args`
        defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
        given = dict(zip([argument.name for argument in arguments], args))
        self.found[function._schema.name] = defaults | given | (options or {})
        return function(*args, **(options or {}))


@pytest.mark.parametrize("causal", [True, False])
def test_cudnn_attention_is_called_as_the_schema_of_torch_says(causal):
    query = torch.empty(512, 8, 64, dtype=torch.bfloat16, device="meta")
    key = torch.empty(512 if causal else 1024, 2, 64, dtype=torch.bfloat16, device="meta")
    with _Calls() as calls:
        found, sums = cudnn_attention.dense_attention(query, key, key, scale=0.25, causal=causal)
    call = calls.found["aten::_scaled_dot_product_cudnn_attention"]
    assert {name: tuple(call.pop(name).shape) for name in ("query", "key", "value")} == {
        "query": (1, 8, 512, 64),
        "key": (1, 2, len(key), 64),
        "value": (1, 2, len(key), 64),
    }
    assert call == {
        "attn_bias": None,
        "compute_log_sumexp": True,
        "dropout_p": 0.0,
        "is_causal": causal,
        "return_debug_mask": False,
        "scale": 0.25,
    }
    schema = torch.ops.aten._scaled_dot_product_cudnn_attention.default._schema
    assert [result.name for result in schema.returns][:2] == ["output", "logsumexp"]
    assert (found.shape, found.dtype) == (query.shape, query.dtype)
    assert (sums.shape, sums.dtype) == ((8, 512), torch.float32)
