"""Experts that stay quantized give the logits of the dequantized experts."""

from __future__ import annotations

import dataclasses
import gc
import json
import resource
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.errors import ContractError
from mvllm.families.gpt_oss.experts import GptOssExperts
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.quantization.quantized_matrix import QuantizedMatrix, staging
from mvllm.layers.quantization.rtn_matrix import RTNMatrix, pack_nibbles, unpack_nibbles
from mvllm.layers.quantized_experts import ReadOnce
from mvllm.models.causal_lm import CausalLM
from mvllm.models.registry import resolve_model_class
from mvllm.models.weight_loader import load_weights
from mvllm.ops.block_quantized_linear import BlockQuantizedWeight
from mvllm.ops.float8_linear import Float8Weight
from mvllm.ops.quantized_moe import ExpertWeight, quantized_moe, quantized_ungated_moe
from mvllm.platform.op_provider import OpCase, OpProvider
from tests.helpers.float8_zoo import make_float8
from tests.helpers.model_zoo import ZOO, make_checkpoint
from tests.helpers.mxfp4 import pack_experts
from tests.helpers.paged_driver import PagedDriver, load_model, make_context, read_config
from tests.helpers.quantized_zoo import make_quantized
from tests.helpers.thread_ranks import run_ranks
from tests.unit.models.test_quantized import run

TOLERANCE = 1e-4
SIZES = {"intermediate_size": 128, "moe_intermediate_size": 128, "vocab_size": 320}


class Provider:
    """The reference as provider; it does not round inputs, so that logits equal those of dequantized experts.

    Attributes:
        prepared: The weights of each layer, as passed to `prepare`.
    """

    def __init__(self, *, declined: str = "") -> None:
        self.prepared: list[tuple[list[ExpertWeight], list[ExpertWeight]]] = []
        self._declined = declined

    @property
    def providers(self) -> list[OpProvider]:
        return [
            OpProvider(reference.__name__, "experts", reference, self._supports, prepare=self._prepare)
            for reference in (quantized_moe, quantized_ungated_moe)
        ]

    def _supports(self, case: OpCase) -> list[str]:
        return ["not these"] if self._declined and self._declined in repr(case.facts) else []

    def _prepare(self, pair: tuple[Sequence[ExpertWeight], Sequence[ExpertWeight]]) -> Any:
        weights = list(pair[0]), list(pair[1])
        self.prepared.append(weights)
        return tuple([_with_float_inputs(weight) for weight in of_matrix] for of_matrix in weights)


def _with_float_inputs(weight: ExpertWeight) -> ExpertWeight:
    if isinstance(weight, Float8Weight):
        return dataclasses.replace(weight, inputs="floats")
    return dataclasses.replace(weight, int8_activations=False)


@pytest.fixture
def divisible_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets sizes of experts whose shards are whole groups and blocks."""

    def with_sizes(entry: Any) -> Any:
        def config() -> Any:
            made = entry.config()
            for key, value in SIZES.items():
                if hasattr(made, key):
                    setattr(made, key, value)
            return made

        return dataclasses.replace(entry, config=config)

    for name in ("mixtral", "qwen3moe", "deepseek3", "gptoss", "nemotronh"):
        monkeypatch.setitem(ZOO, name, with_sizes(ZOO[name]))


def make_mxfp4(name: str, folder: Path) -> Path:
    pack_experts(make_checkpoint(name, folder / "plain", tokenizer=False), folder / "packed")
    return folder / "packed"


CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "awq mixtral": lambda folder: make_quantized("awq", folder, "mixtral").quantized,
    "gptq qwen3moe": lambda folder: make_quantized("gptq", folder, "qwen3moe").quantized,
    "w4a16-zero-points qwen3moe": lambda folder: make_quantized("w4a16-zero-points", folder, "qwen3moe").quantized,
    "awq-latent deepseek3": lambda folder: make_quantized("awq-latent", folder, "deepseek3").quantized,
    "fp8-blocks deepseek3": lambda folder: make_float8("fp8-blocks", folder, "deepseek3").quantized,
    "fp8-static qwen3moe": lambda folder: make_float8("fp8-static", folder, "qwen3moe").quantized,
    "mxfp4 gptoss": lambda folder: make_mxfp4("gptoss", folder),
}


def experts_of(model: CausalLM) -> list[FusedMoE | GptOssExperts]:
    return [module for module in model.modules() if isinstance(module, FusedMoE | GptOssExperts)]


def logits(model: CausalLM) -> torch.Tensor:
    return run(PagedDriver(model))


def check_experts_stay_quantized(folder: Path, ranks: Sequence[int] = (1, 2)) -> None:
    """Compares the logits with those of dequantized experts."""
    plain = load_model(folder)
    assert not any(experts.stays_quantized for experts in experts_of(plain))
    wanted = logits(plain)
    assert wanted.std() > 0.5

    def packed(tp: GroupCoordinator) -> torch.Tensor:
        provider = Provider()
        model = load_model(folder, make_context(tp=tp, providers=provider.providers))
        layers = experts_of(model)
        assert layers and len(provider.prepared) == len(layers)
        for experts, (gate_up, down) in zip(layers, provider.prepared, strict=True):
            assert experts.stays_quantized and len(gate_up) == len(down) == experts.num_experts
            assert not any("bias" not in name for name, _ in experts.named_parameters()), "no floats beside them"
        return logits(model)

    for num_ranks in ranks:
        for found in run_ranks(num_ranks, packed):
            torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


def check_experts_are_dequantized(folder: Path, declined: str = "") -> None:
    """Compares the logits with those of dequantized experts, where the provider does not support them."""
    provider = Provider(declined=declined)
    model = load_model(folder, make_context(providers=provider.providers))
    assert not provider.prepared and not any(experts.stays_quantized for experts in experts_of(model))
    torch.testing.assert_close(logits(model), logits(load_model(folder)), atol=1e-5, rtol=0)


def check_split_blocks_are_dequantized(folder: Path) -> None:
    """Compares the logits of one rank, and of two whose shards split a block."""
    wanted = logits(load_model(folder))

    def sharded_logits(tp: GroupCoordinator) -> torch.Tensor:
        model = load_model(folder, make_context(tp=tp, providers=Provider().providers))
        assert [experts.stays_quantized for experts in experts_of(model)] == [tp.world_size == 1] * 2
        return logits(model)

    for ranks in (1, 2):
        for found in run_ranks(ranks, sharded_logits):
            torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.usefixtures("divisible_sizes")
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_logits_equal_those_of_dequantized_experts_on_every_rank(checkpoint: str, tmp_path: Path) -> None:
    can_be_sharded = checkpoint != "awq-latent deepseek3"  # its attention weights cannot
    check_experts_stay_quantized(CHECKPOINTS[checkpoint](tmp_path), (1, 2) if can_be_sharded else (1,))


@pytest.mark.usefixtures("divisible_sizes")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["mixtral", "gptoss"])
def test_quantization_on_load_quantizes_experts(name: str, quantization: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path, tokenizer=False)
    provider, plain = Provider(), load_model(folder, quantization=quantization)
    model = load_model(folder, make_context(providers=provider.providers), quantization=quantization)
    for experts, (gate_up, down) in zip(experts_of(plain), provider.prepared, strict=True):
        for floats, weights in ((experts.gate_up, gate_up), (experts.down, down)):
            near = torch.stack([weight.dequantize() for weight in weights])
            bound = torch.stack([weight.scales.amax(dim=1, keepdim=True) / 2 for weight in weights])
            off = (near - floats).abs()
            assert off.max() > 0 and (off <= bound * 1.02 + 1e-7).all()
            floats.data.copy_(near)
            assert {weight.bits for weight in weights} == {8 if quantization == "int8" else 4}
            assert all(weight.int8_activations for weight in weights)
    torch.testing.assert_close(logits(model), logits(plain), atol=TOLERANCE, rtol=0)


@pytest.mark.usefixtures("divisible_sizes")
def test_ranks_quantize_their_shards_of_experts(tmp_path: Path) -> None:
    folder = make_checkpoint("mixtral", tmp_path, tokenizer=False)
    wanted = logits(load_model(folder))

    def found(tp: GroupCoordinator) -> torch.Tensor:
        provider = Provider()
        model = load_model(folder, make_context(tp=tp, providers=provider.providers), quantization="int8")
        [(gate_up, down), _] = provider.prepared
        assert {tuple(weight.shape) for weight in gate_up} == {(128, 64)}
        assert {tuple(weight.shape) for weight in down} == {(64, 64)}
        return logits(model)

    for each in run_ranks(2, found):
        assert (each - wanted).pow(2).mean().sqrt() < 0.1 * wanted.std()


@pytest.mark.usefixtures("divisible_sizes")
def test_experts_are_quantized_and_freed_one_by_one_while_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most one expert's floats are in memory at a time, and its weight exists only while it is converted."""
    folder = make_checkpoint("qwen3moe", tmp_path, tokenizer=False)
    floats: list[weakref.ref[torch.Tensor]] = []
    init, loaded = RTNMatrix.__init__, RTNMatrix.tensors_loaded
    live: list[int] = []

    def recording_init(self: RTNMatrix, *args: Any) -> None:
        init(self, *args)
        if self.layout.is_expert:
            assert self.floats is not None
            floats.append(weakref.ref(self.floats))

    def counting_tensors_loaded(self: RTNMatrix) -> None:
        live.append(sum(ref() is not None for ref in floats))
        loaded(self)

    monkeypatch.setattr(RTNMatrix, "__init__", recording_init)
    monkeypatch.setattr(RTNMatrix, "tensors_loaded", counting_tensors_loaded)
    alive: list[int] = []

    def prepare(pair: tuple[Sequence[ExpertWeight], Sequence[ExpertWeight]]) -> Any:
        for weights in pair:
            seen: list[weakref.ref[ExpertWeight]] = []
            for weight in weights:
                seen.append(weakref.ref(weight))
                alive.append(sum(ref() is not None for ref in seen))
        return pair

    provider = OpProvider("quantized_moe", "experts", quantized_moe, lambda case: [], prepare=prepare)
    config = read_config(folder, quantization="int4")
    from mvllm.layers.quantization.registry import quantization_method

    ctx = dataclasses.replace(make_context(providers=[provider]), quantization=quantization_method(config))
    model = resolve_model_class(config.architecture)(config, ctx)
    load_weights(model, folder, use_tqdm=False, on_loaded=model.tensor_loaded)
    model.after_load()
    assert len(floats) == 2 * 2 * 6
    assert live == sorted(live, reverse=True) and len(set(live)) >= len(floats) - 2, "each was dropped before the next"
    assert max(alive) <= 2 and len(alive) == len(floats)
    gc.collect()
    assert not any(isinstance(module, QuantizedMatrix) for module in model.modules())


def test_an_expert_weight_can_be_read_once() -> None:
    made: list[int] = []
    weights = ReadOnce([lambda i=i: made.append(i) for i in range(3)])  # type: ignore[misc,func-returns-value]
    assert len(weights) == 3 and made == []
    assert list(weights) == [None] * 3 and made == [0, 1, 2]
    with pytest.raises(ContractError, match="expert 1 was read before"):
        weights[1]


def float_formats() -> Iterator[tuple[str, Callable[[Path], Path], str]]:
    yield "column order", lambda folder: make_quantized("gptq-desc-act", folder, "qwen3moe").quantized, ""
    yield "declined", CHECKPOINTS["awq mixtral"], "'bits', 4"


@pytest.mark.usefixtures("divisible_sizes")
@pytest.mark.parametrize(("checkpoint", "declined"), [pytest.param(*rest, id=name) for name, *rest in float_formats()])
def test_unsupported_experts_are_dequantized(checkpoint: Callable[[Path], Path], declined: str, tmp_path: Path) -> None:
    check_experts_are_dequantized(checkpoint(tmp_path), declined)


@pytest.mark.usefixtures("divisible_sizes")
def test_shards_that_split_a_block_are_dequantized(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(SIZES, "intermediate_size", 96)
    check_split_blocks_are_dequantized(CHECKPOINTS["mxfp4 gptoss"](tmp_path))


@pytest.mark.usefixtures("divisible_sizes")
def test_experts_of_different_formats_are_dequantized_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = make_quantized("gptq", tmp_path, "qwen3moe")
    path = checkpoint.quantized / "config.json"
    config = json.loads(path.read_text())
    plain = load_file(checkpoint.plain / "model.safetensors")
    config["quantization_config"]["dynamic"] = {r"-:.*\.experts\.1\..*": {}}
    path.write_text(json.dumps(config))
    from safetensors.torch import save_file

    stored = load_file(checkpoint.quantized / "model.safetensors")
    kept = {name: tensor for name, tensor in stored.items() if ".experts.1." not in name}
    floats = {name: tensor for name, tensor in plain.items() if ".experts.1." in name}
    save_file({**kept, **floats}, checkpoint.quantized / "model.safetensors")
    provider = Provider()
    with caplog.at_level("INFO", logger="mvllm"):
        model = load_model(checkpoint.quantized, make_context(providers=provider.providers))
    assert not provider.prepared
    torch.testing.assert_close(logits(model), logits(load_model(checkpoint.plain)), atol=TOLERANCE, rtol=0)
    assert sum("different formats" in record.message for record in caplog.records) == 1


def test_down_may_be_floats_where_gate_and_up_are_quantized(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = make_quantized("awq-some-floats", tmp_path, "qwen3moe")
    with caplog.at_level("INFO", logger="mvllm"):
        model = load_model(checkpoint.quantized, make_context(providers=Provider().providers))
    assert sum("different formats" in record.message for record in caplog.records) == 1
    assert not any(experts.stays_quantized for experts in experts_of(model))
    torch.testing.assert_close(logits(model), logits(load_model(checkpoint.plain)), atol=TOLERANCE, rtol=0)


@pytest.mark.usefixtures("divisible_sizes")
def test_blocks_have_the_bytes_of_the_file_and_16_bit_inputs_are_rounded(tmp_path: Path) -> None:
    folder = CHECKPOINTS["mxfp4 gptoss"](tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        provider = Provider()
        model = load_model(folder, make_context(dtype=dtype, providers=provider.providers))
        for experts, (gate_up, down) in zip(experts_of(model), provider.prepared, strict=True):
            assert experts.num_experts == len(gate_up)
            for weight in (*gate_up, *down):
                assert isinstance(weight, BlockQuantizedWeight) and set(weight.formats) == {"mxfp4"}
                assert weight.int8_activations == (dtype != torch.float32)
                assert sum(part.data.numel() for part in weight.parts) == weight.shape.numel() // 32 * 17
                assert all(part.data.is_contiguous() for part in weight.parts)


def test_staging_memory_is_allocated_on_first_write() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    staged = staging(4, 1 << 26, dtype=torch.bfloat16)
    assert resident() - before < 1 << 26
    staged.data[0] = 1
    assert resident() - before > 1 << 26 and not staged.data[3, :100].any()


@pytest.mark.parametrize("columns", [6, 7])
def test_packed_nibbles_are_unpacked_to_the_same_values(columns: int) -> None:
    values = torch.randint(-8, 8, (3, columns), dtype=torch.int8)
    packed = pack_nibbles(values)
    assert packed.shape == (3, (columns + 1) // 2) and torch.equal(unpack_nibbles(packed, columns), values)
