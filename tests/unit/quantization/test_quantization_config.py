"""Quantization settings and their errors, before any weight is read and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.errors import ConfigError, ModelError
from mvllm.layers.matrix_layout import MatrixLayout, Part
from mvllm.layers.quantization import awq
from mvllm.layers.quantization.interface import PackedFormat, QuantizationMethod, format_of_all
from mvllm.layers.quantization.registry import quantization_method, supported_methods
from mvllm.models.checkpoint_support import check_quantization
from tests.helpers.float8_zoo import FLOAT8_SCHEMES
from tests.helpers.model_zoo import make_checkpoint
from tests.helpers.paged_driver import make_context, read_config
from tests.helpers.plugins import prepend, write_metadata
from tests.helpers.quantized_zoo import PER_TOKEN, SCHEMES, compressed

CHANNEL = {"num_bits": 8, "strategy": "channel", "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
GROUP = {"num_bits": 4, "strategy": "group", "symmetric": True, "group_size": 32}


def nested(depth: int) -> list[Any]:
    lists: list[Any] = ["x"]
    for _ in range(depth):
        lists = [lists]
    return lists


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-gqa", tmp_path_factory.mktemp("plain"), tokenizer=False)


def config_of(folder: Path, settings: dict[str, Any] | None = None, **arguments: Any) -> ModelConfig:
    overrides = {} if settings is None else {"hf_overrides": {"quantization_config": settings}}
    return read_config(folder, **overrides, **arguments)


def method_of(folder: Path, settings: dict[str, Any], **arguments: Any) -> QuantizationMethod:
    method = quantization_method(config_of(folder, settings, **arguments))
    assert method is not None
    return method


def layout(*names: str, **facts: Any) -> MatrixLayout:
    parts = tuple(Part(name, 32, slice(0, 32), slice(32 * i, 32 * i + 32)) for i, name in enumerate(names))
    return MatrixLayout(parts, 64, slice(0, 64), 32 * len(parts), **facts)


def is_quantized(method: QuantizationMethod, *names: str, **facts: Any) -> bool:
    return method.matrix(make_context(), layout(*names, **facts)) is not None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_test_scheme_is_a_supported_method(scheme: str, folder: Path) -> None:
    settings = SCHEMES[scheme].config
    config = config_of(folder, settings, quantization=settings["quant_method"])
    check_quantization(config)
    assert config.quantization == settings["quant_method"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "hqq"}, r"'hqq', which is not supported. Supported: awq, .*quantization='int8'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"'fmt' is 'e5m2', but only 'e4m3'"),
        ({"quant_method": "fp8", "activation_scheme": "x"}, r"'activation_scheme' is 'x', but only 'dynamic'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"'weight_block_size' should be two integers > 0"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"should be two integers > 0, found \[128, 0\]"),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, r"should be a list of texts"),
        ({"quant_method": "awq", "bits": 8}, r"'bits' is 8, but only 4 is supported"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"'version' is 'gemv', but only 'gemm'"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, r"'zero_point' is false"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": "lm_head"}, r"should be a list of texts"),
        ({"quant_method": "awq", "bits": 4, "group_size": 0}, r"'group_size' should be at least 1"),
        ({"quant_method": "gptq", "bits": 3}, r"'bits' is 3, but only 4 or 8 is supported"),
        ({"quant_method": "gptq"}, r"lacks the key 'bits'"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, r"'marlin', but only 'gptq' or 'gptq_v2'"),
        ({"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": {"x": 1}}, r"should be a list of texts"),
        ({"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": [["x", 1]]}, r"should be a list of texts"),
        ({"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": nested(500)}, r"list of texts"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {}}}, r"not a valid regular expression"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:x": {"bits": 2}}}, r"dynamic '\+:x': 'bits' is 2"),
        (compressed(CHANNEL, "float-quantized"), r"weights: 'type' is 'int', but only 'float'"),
        (compressed({**FLOAT8, "strategy": "block"}, "float-quantized"), r"lacks the key 'block_structure'"),
        (compressed({**FLOAT8, "num_bits": 4}, "float-quantized"), r"'num_bits' is 4, but only 8"),
        (compressed({**FLOAT8, "strategy": "group"}, "float-quantized"), r"lacks the key 'group_size'"),
        (compressed(FLOAT8, "float-quantized", PER_TOKEN), r"input_activations: 'type' is 'int', but only 'float'"),
        (compressed({**CHANNEL, "type": "float"}, "int-quantized"), r"weights: 'type' is 'float'"),
        (compressed({**CHANNEL, "strategy": "block"}, "int-quantized"), r"'strategy' is 'block'"),
        (compressed({**GROUP, "num_bits": 2}), r"'num_bits' is 2"),
        (compressed({**GROUP, "group_size": None}), r"the strategy is 'group', but there is no 'group_size'"),
        (
            compressed(CHANNEL, "int-quantized", {**PER_TOKEN, "dynamic": False, "strategy": "tensor"}),
            r"input_activations: 'dynamic' is False, but only True",
        ),
        (compressed(CHANNEL, "int-quantized", {**PER_TOKEN, "symmetric": False}), r"'symmetric' is False"),
        (compressed(GROUP, kv_cache_scheme={"num_bits": 8}), r"'kv_cache_scheme' asks for a quantized KV cache"),
        (compressed(GROUP, sparsity_config={"format": "sparse-24-bitmask"}), r"asks for sparse weights"),
        (compressed(GROUP, sparsity_config="dense"), r"asks for sparse weights"),
        (compressed(GROUP, ignore=["re:("]), r"not a valid regular expression"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, r"lacks the key 'config_groups'"),
    ],
)
def test_unsupported_settings_are_refused_by_key(settings: dict[str, Any], words: str, folder: Path) -> None:
    with pytest.raises(ModelError, match=words):
        check_quantization(config_of(folder, settings))


@pytest.mark.parametrize("stored", ["Acme_Bits", "acme_bits", "acme-bits"])
@pytest.mark.parametrize("asked", [None, "acme_bits"])
def test_a_plugins_method_is_found_however_its_name_is_spelled(
    stored: str, asked: str | None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_metadata(tmp_path, "acme-extras", "[mvllm.quantization]\nacme_bits = tests.helpers.acme_bits:AWQ\n")
    prepend(monkeypatch, [str(path)])
    monkeypatch.setitem(sys.modules, "tests.helpers.acme_bits", awq)
    assert isinstance(method_of(folder, {**SCHEMES["awq"].config, "quant_method": stored}, quantization=asked), awq.AWQ)


@pytest.mark.parametrize("error", [KeyError("bits"), SystemExit(3)])
@pytest.mark.parametrize("name", ["from_config", "of"])  # `of` is the deprecated name
def test_a_plugins_method_that_fails_over_its_settings_is_named(
    error: BaseException, name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(cls: type[awq.AWQ], settings: HFConfig) -> awq.AWQ:
        raise error

    Broken = type("Broken", (awq.AWQ,), {name: classmethod(fail)})
    path = write_metadata(tmp_path, "acme-extras", "[mvllm.quantization]\nacme = tests.helpers.acme_bits:AWQ\n")
    prepend(monkeypatch, [str(path)])
    monkeypatch.setitem(sys.modules, "tests.helpers.acme_bits", SimpleNamespace(AWQ=Broken))
    with pytest.raises(ConfigError, match=rf"Broken failed over .*{type(error).__name__}") as caught:
        check_quantization(config_of(folder, {"quant_method": "acme"}))
    assert caught.value.__cause__ is error


def test_mismatched_method_names_are_refused_with_a_hint(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"'int8', but the weights .* stored as 'awq' already.*Leave it out"):
        config_of(folder, SCHEMES["awq"].config, quantization="int8")
    with pytest.raises(ConfigError, match=r"'gptq', but the weights .* stored as 'awq' already"):
        config_of(folder, SCHEMES["awq"].config, quantization="gptq")
    with pytest.raises(
        ConfigError, match=r"'awq', which is a way to store weights, .* not quantized.*'int8' or quantization='int4'"
    ):
        check_quantization(config_of(folder, quantization="awq"))
    with pytest.raises(
        ConfigError,
        match=r"'int5', and there is no such method.*: awq, compressed-tensors, fbgemm-fp8, fp8, gguf, gptq",
    ):
        check_quantization(config_of(folder, quantization="int5"))
    assert {"awq", "compressed-tensors", "gptq", "int4", "int8"} <= set(supported_methods())


def test_random_weights_are_refused_for_packed_formats_and_can_be_quantized(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"'dummy' makes random floats.*hf_overrides={'quantization_config': {}}"):
        check_quantization(config_of(folder, SCHEMES["awq"].config), "dummy")
    check_quantization(config_of(folder, {}, quantization="int8"), "dummy")


def test_the_front_end_checks_settings_without_torch(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    program = (
        "import sys, json\n"
        "from mvllm.config.hf_config import HFConfig\n"
        "from mvllm.layers.quantization import awq, compressed_tensors, float8, gptq, online_quantization, registry\n"
        "from mvllm.config.quantization import resolve_quantization\n"
        f"for settings in json.loads({json.dumps([s.config for s in (SCHEMES | FLOAT8_SCHEMES).values()])!r}):\n"
        "    name = resolve_quantization(HFConfig({'quantization_config': settings}, 'config.json'), None)\n"
        "    registry._resolve(name, 'config.json').from_config(HFConfig(settings, 'config.json'))\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    assert config["model_type"] == "llama"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


class TestWhichMatrices:
    def test_awq_skips_listed_modules_and_every_lm_head(self, folder: Path) -> None:
        method = method_of(folder, SCHEMES["awq-some-floats"].config)
        assert is_quantized(method, "model.layers.0.mlp.up_proj")
        assert not is_quantized(method, "model.layers.1.mlp.up_proj")
        assert not is_quantized(method, "lm_head", is_head=True)

    def test_fp8_skips_listed_modules_and_their_submodules(self, folder: Path) -> None:
        listed = ["model.layers.1", "model.layers.0.mlp.gate"]
        method = method_of(folder, {**FLOAT8_SCHEMES["fp8-blocks"].config, "modules_to_not_convert": listed})
        assert is_quantized(method, "model.layers.10.mlp.up_proj")
        assert is_quantized(method, "model.layers.0.mlp.gate_proj")
        assert not is_quantized(method, "model.layers.1.mlp.up_proj")
        assert not is_quantized(method, "lm_head", is_head=True)
        with pytest.raises(ModelError, match=r"gate: floats; .*FP8 with scales of 32 rows and 16 columns"):
            is_quantized(method, "model.layers.0.mlp.gate", "model.layers.0.mlp.up_proj")
        with pytest.raises(ModelError, match=r"stored as \[in, out\] is not supported in FP8"):
            is_quantized(method, "model.layers.0.mlp.up_proj", transposed=True)

    def test_gptq_quantizes_the_lm_head_if_configured_but_never_a_tied_one(self, folder: Path) -> None:
        settings = SCHEMES["gptq"].config
        assert not is_quantized(method_of(folder, settings), "lm_head", is_head=True)
        with_head = method_of(folder, {**settings, "lm_head": True})
        assert is_quantized(with_head, "lm_head", is_head=True)
        assert not is_quantized(with_head, "model.embed_tokens", is_head=True, tied=True)

    def test_gptq_may_list_the_quantized_modules(self, folder: Path) -> None:
        listed = [["self_attn.q_proj"], ["mlp.up_proj", "mlp.down_proj"]]
        method = method_of(folder, {**SCHEMES["gptq"].config, "modules_in_block_to_quantize": listed})
        assert is_quantized(method, "model.layers.0.mlp.down_proj")
        assert not is_quantized(method, "model.layers.0.self_attn.o_proj")

    def test_compressed_tensors_targets_classes_names_and_patterns(self, folder: Path) -> None:
        settings = compressed(GROUP, ignore=["model.layers.0.mlp.up_proj", r"re:.*\.layers\.1\."])
        method = method_of(folder, settings)
        assert is_quantized(method, "model.layers.0.mlp.down_proj")
        assert not is_quantized(method, "model.layers.0.mlp.up_proj")
        assert not is_quantized(method, "model.layers.1.mlp.down_proj")
        settings["config_groups"]["group_0"]["targets"] = ["re:.*down_proj"]
        method = method_of(folder, settings)
        assert is_quantized(method, "model.layers.0.mlp.down_proj")
        assert not is_quantized(method, "model.layers.0.self_attn.o_proj")

    def test_parts_of_one_matrix_that_are_stored_differently_are_refused(self, folder: Path) -> None:
        method = method_of(folder, compressed(GROUP, ignore=["model.layers.0.mlp.up_proj"]))
        with pytest.raises(ModelError, match=r"gate_proj: 4 bits in groups of 32, symmetric; .*up_proj: floats"):
            is_quantized(method, "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")

    def test_equal_parts_have_one_format(self) -> None:
        four = PackedFormat(4, 32)
        assert format_of_all(layout("a", "b"), [four, four]) is four
        assert format_of_all(layout("a", "b"), [None, None]) is None

    def test_quantization_on_load_includes_every_matrix_and_the_lm_head_with_eight_bits(self, folder: Path) -> None:
        method = quantization_method(config_of(folder, quantization="int4"))
        assert method is not None
        assert method.matrix(make_context(), layout("x")).format.bits == 4  # type: ignore[union-attr]
        head = method.matrix(make_context(), layout("lm_head", is_head=True))
        assert head is not None and (head.format.bits, head.group_size, head.format.symmetric) == (8, 64, True)  # type: ignore[attr-defined]
