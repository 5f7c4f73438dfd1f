"""Tiny random checkpoints of multimodal models, made with transformers, with their tokenizers and processors.

Weights are drawn as those of tests/helpers/model_zoo.py: a wrong mask or angle changes the greedy token. The features
of images are as large as the embeddings of tokens, so another image changes it, too.

    for name in ZOO: folder = make_checkpoint(name, tmp_path / name)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto import AutoModelForMultimodalLM

from mvllm.multimodal.processor_loading import _without_video_processor
from tests.helpers.model_zoo import CHAT_TEMPLATE, base_tokenizer
from tests.helpers.random_weights import draw_weight

VOCAB_SIZE = 384
FIRST_SPECIAL_ID = 320
"""Id of the first token in an entry's `specials`."""
BOS_TOKEN_ID, EOS_TOKEN_ID = 0, 1

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
}
"""Sizes of language models."""


@dataclass(frozen=True)
class MultiModalEntry:
    """One checkpoint.

    Attributes:
        config: Makes its transformers config.
        processor: Makes its processor for a tokenizer, which has the tokens of `specials`.
        specials: Special tokens, with the ids from FIRST_SPECIAL_ID on, by the tokenizer's attribute for each.
        placeholder: The text that stands for an item in a prompt.
        modality: What its items are.
        video_placeholder: The text that stands for a video; empty for models that take none.
        video_settings: Of its video processor.
        sizes: Width and height of the images that tests draw.
        inputs: Arguments of the model beside token ids that transformers needs for `n` generated tokens, from those of
            the prompt.
        rename: Changes the names of the saved tensors, as older checkpoints have them.
        has_states: The language model has sequence states, so cached prefixes end at their snapshots.
        has_stages: Whether pipeline stages can share the model.
        model_impl: As in ModelConfig.
        gate: Whether the tests of every change use it.
        seed: Of the weights.
        embedding_scale: Standard deviation of token embeddings.
    """

    config: Callable[[], Any]
    processor: Callable[[Any], Any]
    specials: Mapping[str, str] = field(default_factory=lambda: {"image_token": "<image>"})
    placeholder: str = "<image>"
    modality: str = "image"
    video_placeholder: str = ""
    video_settings: Mapping[str, Any] = field(default_factory=dict)
    sizes: Sequence[tuple[int, int]] = ((40, 24), (19, 50), (64, 64))
    inputs: Callable[[dict[str, Any], int], dict[str, Any]] = lambda inputs, n: inputs
    rename: Callable[[str], str] | None = None
    has_states: bool = False
    has_stages: bool = True
    model_impl: str = "auto"
    gate: bool = False
    seed: int = 0
    embedding_scale: float = 0.4


def zoo() -> dict[str, MultiModalEntry]:
    """All entries by name; none has that of an entry of tests/helpers/model_zoo.py."""
    from tests.helpers.zoo_audio import AUDIO
    from tests.helpers.zoo_grids import GRIDS
    from tests.helpers.zoo_tiles import TILES
    from tests.helpers.zoo_vision import VISION

    return {**VISION, **GRIDS, **TILES, **AUDIO}


def make_checkpoint(entry: str | MultiModalEntry, folder: Path) -> Path:
    """Writes model, tokenizer and processor of an entry, or of the entry of `zoo` with that name."""
    if isinstance(entry, str):
        entry = zoo()[entry]
    save_model(entry.config(), folder, entry.seed, entry.embedding_scale)
    save_processor(entry.processor(make_tokenizer(entry.specials)), folder)
    if entry.video_settings:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(dict(entry.video_settings)))
    if entry.rename is not None:
        _rename_tensors(folder, entry.rename)
    return folder


def make_tokenizer(specials: Mapping[str, str]) -> Any:
    """A byte-level tokenizer with special tokens from FIRST_SPECIAL_ID on, which are its attributes, too."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    base = base_tokenizer()
    base.add_tokens([f"<unused{i}>" for i in range(FIRST_SPECIAL_ID - base.get_vocab_size())])
    base.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in specials.values()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=base,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        chat_template=CHAT_TEMPLATE,
        extra_special_tokens=dict(specials),
    )
    ids = tokenizer.convert_tokens_to_ids(list(specials.values()))
    assert ids == list(range(FIRST_SPECIAL_ID, FIRST_SPECIAL_ID + len(ids))), ids
    return tokenizer


def save_processor(processor: Any, folder: Path) -> None:
    """Writes a processor, which may lack some of its parts."""
    names = [name for name in processor.get_attributes() if getattr(processor, name) is not None]
    processor.get_attributes = lambda: names
    processor.save_pretrained(folder)


def without_video_processor(kind: Any) -> Any:
    """A processor class that is built without its video processor, which needs torchvision."""
    return _without_video_processor(kind)


def save_model(config: Any, folder: Path, seed: int = 0, embedding_scale: float = 0.4) -> PreTrainedModel:
    """Writes a model with random weights; returns it as transformers runs it: eager attention, float32."""
    model = AutoModelForMultimodalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    draw_weights(model, seed, embedding_scale)
    model.generation_config.eos_token_id = EOS_TOKEN_ID
    model.save_pretrained(folder)
    return model


def load_reference(folder: Path) -> PreTrainedModel:
    """The checkpoint as transformers runs it: eager attention, float32."""
    model = AutoModelForMultimodalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return model.eval()


@torch.no_grad()
def draw_weights(model: PreTrainedModel, seed: int = 0, embedding_scale: float = 0.4) -> None:
    """Fills a multimodal model with random weights. Special tokens have small logits, so that none is generated."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".experts." in name and parameter.dim() == 3:  # [experts, out, in]
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1]))
        elif parameter.dim() > 2:  # a convolution
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter[0].numel()))
        else:
            parameter.copy_(draw_weight(name, parameter.shape, generator, embedding_scale=embedding_scale))
    model.tie_weights()
    head = model.get_output_embeddings()
    if head is not None:
        head.weight[FIRST_SPECIAL_ID:] *= 0.05
        audio_id = getattr(model.config, "audio_token_id", None)
        if audio_id is not None and audio_id < FIRST_SPECIAL_ID:
            head.weight[audio_id] *= 0.05


def _rename_tensors(folder: Path, rename: Callable[[str], str]) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file({rename(name): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def edit_config(folder: Path, **values: Any) -> None:
    """Changes keys of a checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
