"""Tiny random checkpoints of the families that generate images, made with transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from transformers import (
    Emu3Config,
    Emu3ForConditionalGeneration,
    JanusConfig,
    JanusForConditionalGeneration,
    PreTrainedModel,
)
from transformers.models.janus.configuration_janus import JanusVisionConfig, JanusVQVAEConfig

from tests.helpers.model_zoo import BOS_TOKEN_ID, CHAT_TEMPLATE, EOS_TOKEN_ID, VOCAB_SIZE, base_tokenizer
from tests.helpers.random_weights import draw_weight

PAD_TOKEN_ID = VOCAB_SIZE - 1
BEGIN_OF_IMAGE_ID = VOCAB_SIZE - 2
NUM_CODES = 96
EMU3_TOKENS = {
    "<|image start|>": VOCAB_SIZE,
    "<|image token|>": VOCAB_SIZE + 1,
    "<|extra_200|>": VOCAB_SIZE + 2,
    "<|extra_201|>": VOCAB_SIZE + 3,
    "<|image end|>": VOCAB_SIZE + 4,
    "<image>": VOCAB_SIZE + 5,
}
EMU3_FIRST_CODE = VOCAB_SIZE + 6
EMU3_SCALE = 2

_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": PAD_TOKEN_ID,
}


def make_janus(folder: Path, *, grid: int = 24, tied: bool = False, tokenizer: bool = True, seed: int = 0) -> Path:
    """Writes a Janus checkpoint whose images have `grid` x `grid` codes, and twice as many pixels along each side."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "projection_dim": 64}
    vision = JanusVisionConfig(**sizes, image_size=grid, patch_size=1, num_image_tokens=grid * grid)
    vq = JanusVQVAEConfig(
        embed_dim=8,
        num_embeddings=NUM_CODES,
        latent_channels=16,
        base_channels=32,
        channel_multiplier=[1, 2],
        num_res_blocks=1,
        projection_dim=64,
        image_token_embed_dim=64,
    )
    text = {"model_type": "llama", **_TEXT, "tie_word_embeddings": False}
    config = JanusConfig(
        text_config=text,
        vision_config=vision.to_dict(),
        vq_config=vq.to_dict(),
        image_token_id=5,
        tie_word_embeddings=tied,
    )
    config._attn_implementation = "eager"
    model = JanusForConditionalGeneration(config)
    _draw(model, seed)
    if tied:
        model.tie_weights()
    model.save_pretrained(folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "boi_token_id": BEGIN_OF_IMAGE_ID}))
    if tokenizer:
        _save_tokenizer(folder)
    return folder


def make_emu3(folder: Path, *, tokenizer: bool = True) -> Path:
    """Writes an Emu3 checkpoint, whose images have EMU3_SCALE pixels per code along each side."""
    codes = {f"<|visual token {code:06d}|>": EMU3_FIRST_CODE + code for code in range(NUM_CODES)}
    config = Emu3Config(
        text_config={**_TEXT, "vocab_size": EMU3_FIRST_CODE + NUM_CODES + 3, "attention_dropout": 0.0},
        vq_config={
            "codebook_size": NUM_CODES,
            "base_channels": 32,
            "channel_multiplier": [1, 2],
            "num_res_blocks": 1,
            "attn_resolutions": [1],
            "hidden_size": 64,
        },
        vocabulary_map={**EMU3_TOKENS, **codes},
    )
    config._attn_implementation = "eager"
    model = Emu3ForConditionalGeneration(config)
    _draw(model)
    model.save_pretrained(folder)
    if tokenizer:
        _save_tokenizer(folder)
    return folder


def load_emu3(folder: Path) -> Emu3ForConditionalGeneration:
    """As `load_janus`."""
    model = Emu3ForConditionalGeneration.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return model.eval()


def load_janus(folder: Path) -> JanusForConditionalGeneration:
    """The checkpoint as transformers runs it: eager attention, float32."""
    model = JanusForConditionalGeneration.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return model.eval()


def _draw(model: PreTrainedModel, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 2:  # a convolution
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter[0].numel()))
            else:
                parameter.copy_(draw_weight(name, parameter.shape, generator, embedding_scale=0.4))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("running_var"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))


def _save_tokenizer(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=base_tokenizer(),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
    )
    num_missing = BEGIN_OF_IMAGE_ID - len(tokenizer)
    tokenizer.add_tokens([f"<unused{i}>" for i in range(num_missing)])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<begin_of_image>", "<pad>"]})
    assert tokenizer.convert_tokens_to_ids("<begin_of_image>") == BEGIN_OF_IMAGE_ID
    tokenizer.save_pretrained(folder)
