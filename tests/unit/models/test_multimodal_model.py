"""The class of multimodal checkpoints: where the encoder is, which tensors it takes, how its weights are changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mvllm.checkpoint_formats.tensor_entry import TensorEntry
from mvllm.layers.context import BuildContext
from mvllm.layers.linear import Linear
from mvllm.layers.weight_target import WeightTarget
from mvllm.models.causal_lm import CausalLM
from mvllm.models.checkpoint import read_checkpoint
from mvllm.models.llama import LlamaForCausalLM
from mvllm.models.registry import resolve_model_class
from mvllm.models.vision.llava import Llava
from mvllm.models.weight_loader import BUFFER_BYTES, load_weights, read_target
from mvllm.models.weight_update import ModelWeightUpdate, UnallocatedContext
from tests.helpers.multimodal_zoo import save_model, zoo
from tests.helpers.paged_driver import PagedDriver, load_model, make_context, read_config
from tests.helpers.thread_ranks import fake_group, run_ranks
from tests.helpers.zoo_vision import name_before_4_52, name_in_modules
from tests.unit.models.test_parity import draw_tokens

TOKENS = draw_tokens(20, seed=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    save_model(zoo()["llava"].config(), folder)
    return folder


def images() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"pixel_values": torch.randn(1, 3, 24, 24, generator=generator)} for _ in range(2)]


@torch.inference_mode()
def encoded(model: CausalLM) -> torch.Tensor:
    assert model.item_encoder is not None
    return torch.cat(model.item_encoder.encode("image", images()))


def logits(*stages: CausalLM) -> torch.Tensor:
    driver = PagedDriver(*stages)
    (found,) = driver.step([(driver.add(len(TOKENS)), TOKENS)])
    return found


def test_the_class_is_the_encoders_in_front_of_the_language_models(folder: Path) -> None:
    family = type(load_model(folder))
    assert family.__name__ == "LlavaForConditionalGeneration"
    assert family.__mro__.index(Llava) < family.__mro__.index(LlamaForCausalLM)


@pytest.mark.parametrize(
    ("rename", "some"),
    [
        (name_before_4_52, "vision_tower.vision_model.embeddings.class_embedding"),
        (name_in_modules, "model.vision_tower.embeddings.class_embedding"),
        (name_in_modules, "model.language_model.norm.weight"),
    ],
)
def test_names_of_other_versions_are_the_same_tensors(
    rename: Callable[[str], str], some: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    renamed = {rename(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    assert some in renamed
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(encoded(load_model(tmp_path)), encoded(load_model(folder)))
    assert torch.equal(logits(load_model(tmp_path)), logits(load_model(folder)))


def test_only_the_first_stage_has_the_encoder(folder: Path) -> None:
    whole = load_model(folder)
    stages = [load_model(folder, make_context(pp=fake_group("pp", rank, 2))) for rank in range(2)]
    assert torch.equal(encoded(stages[0]), encoded(whole))
    assert stages[1].item_encoder is None
    assert not any("tower" in name for name in stages[1].weight_targets())
    torch.testing.assert_close(logits(*stages), logits(whole), atol=1e-5, rtol=0)


def test_every_tensor_parallel_rank_has_the_whole_encoder(folder: Path) -> None:
    alone = encoded(load_model(folder))
    for found in run_ranks(2, lambda tp: encoded(load_model(folder, make_context(tp=tp)))):
        assert torch.equal(found, alone)


def test_without_encoders_the_text_is_the_same(folder: Path) -> None:
    model = load_model(folder, language_model_only=True)
    assert model.item_encoder is None
    assert torch.equal(logits(model), logits(load_model(folder)))


def test_quantization_and_adapters_leave_the_encoder_out(folder: Path) -> None:
    model = load_model(folder, quantization="int8")
    assert model.item_encoder is not None
    of_encoder = {module for module in model.item_encoder.modules() if isinstance(module, Linear)}
    of_text = {module for module in model.modules() if isinstance(module, Linear)} - of_encoder
    assert of_encoder and not any(module.quantized or module.supports_lora for module in of_encoder)
    assert of_text and all(module.quantized and module.supports_lora for module in of_text)
    assert torch.equal(encoded(model), encoded(load_model(folder)))


def test_random_weights_are_those_of_every_sharding(folder: Path) -> None:
    def dummy(ctx: BuildContext) -> CausalLM:
        config = read_config(folder)
        model = resolve_model_class(config.architecture, "auto", config.language_architecture)(config, ctx)
        load_weights(model, folder, load_format="dummy", use_tqdm=False)
        model.after_load()
        return model

    whole = encoded(dummy(make_context()))
    assert whole.isfinite().all() and whole.std() > 0
    assert torch.equal(encoded(dummy(make_context(pp=fake_group("pp", 0, 2)))), whole)


def test_weights_of_the_encoder_are_updated_in_place_by_their_names(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    changed = {name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
    save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})

    config, ctx = read_config(folder), make_context()
    family = resolve_model_class(config.architecture, "auto", config.language_architecture)
    model = family(config, ctx)
    load_weights(model, folder, use_tqdm=False, on_loaded=model.tensor_loaded)
    model.after_load()
    update = ModelWeightUpdate(model, lambda: family(config, UnallocatedContext.of(ctx)))
    for name, entry in update.check(read_checkpoint(tmp_path, 1000), tmp_path, whole=True).items():
        update.load(name, entry, _copy)
    update.check_complete(whole=True)
    update.finish()
    assert not update.storage_replaced
    assert torch.equal(encoded(model), encoded(load_model(tmp_path)))
    assert torch.equal(logits(model), logits(load_model(tmp_path)))


def _copy(entry: TensorEntry, target: WeightTarget) -> None:
    with entry.open_reader() as reader:
        read_target(reader, entry, target, bytearray(BUFFER_BYTES))
