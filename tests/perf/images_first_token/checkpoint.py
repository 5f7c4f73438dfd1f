"""The model and the pictures of the benchmark: a LLaVA checkpoint, its projector file for llama.cpp, and pictures."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np

SIDE, PATCH, WIDTH, LAYERS, HEADS, INNER = 224, 16, 768, 12, 12, 3072
EPSILON = 1e-5
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
IMAGE = "<image>"


def llava_checkpoint(models: Path, text: Path) -> Path:
    """The checkpoint in `models`, made on first use.

    Args:
        text: The checkpoint of the language model, which it takes over.
    """
    folder = models / "hf" / "LLaVA-S"
    if (folder / "complete").exists():
        return folder
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    torch.manual_seed(20260)
    tokenizer = AutoTokenizer.from_pretrained(text)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]}, replace_extra_special_tokens=False)
    text_config = AutoConfig.from_pretrained(text)
    text_config.vocab_size += 64  # room for the placeholder
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            image_size=SIDE,
            patch_size=PATCH,
            projection_dim=WIDTH,
        ),
        text_config=text_config,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-2,  # as LLaVA 1.5
        image_seq_length=(SIDE // PATCH) ** 2,
        tie_word_embeddings=False,
    )
    model = LlavaForConditionalGeneration(config)
    language = AutoModelForCausalLM.from_pretrained(text, dtype=torch.float32)
    language.resize_token_embeddings(text_config.vocab_size, mean_resizing=False)
    model.model.language_model.load_state_dict(language.model.state_dict())
    model.lm_head.load_state_dict(language.lm_head.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    processor.save_pretrained(folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0})
    )
    (folder / "complete").touch()
    return folder


def projector_file(models: Path, folder: Path) -> Path:
    """The tower and the projector of the checkpoint in llama.cpp's format, in bfloat16 as the checkpoint."""
    target = models / "gguf" / "LLaVA-S-mmproj-bf16.gguf"
    if target.exists():
        return target
    import torch
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(target.with_suffix(".part"), "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.has_llava_projector", True)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.use_gelu", False)
    numbers = {"image_size": SIDE, "patch_size": PATCH, "embedding_length": WIDTH, "feed_forward_length": INNER}
    # llama.cpp reads the last layer but one of those that the file says it has.
    for name, value in {**numbers, "projection_dim": WIDTH, "block_count": LAYERS}.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_uint32("clip.vision.attention.head_count", HEADS)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", EPSILON)
    writer.add_array("clip.vision.image_mean", MEAN)
    writer.add_array("clip.vision.image_std", STD)
    writer.add_uint32("general.file_type", gguf.LlamaFileType.MOSTLY_BF16)
    names = {
        "embeddings.class_embedding": "v.class_embd",
        "embeddings.patch_embedding.weight": "v.patch_embd.weight",
        "embeddings.position_embedding.weight": "v.position_embd.weight",
        "pre_layrnorm": "v.pre_ln",
        "post_layernorm": "v.post_ln",
    }
    in_layer = {
        "layer_norm1": "ln1",
        "layer_norm2": "ln2",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.out_proj": "attn_out",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
    }
    projector = {"linear_1": "mm.0", "linear_2": "mm.2"}
    for name, tensor in tensors.items():
        short = name.partition("vision_tower.")[2].removeprefix("vision_model.")
        if "multi_modal_projector." in name:
            layer, _, kind = name.rpartition("multi_modal_projector.")[2].partition(".")
            ours = f"{projector[layer]}.{kind}"
        elif short.startswith("encoder.layers."):
            _, _, number, rest = short.split(".", 3)
            layer, _, kind = rest.rpartition(".")
            ours = f"v.blk.{number}.{in_layer[layer]}.{kind}"
        elif short:
            layer, _, kind = short.rpartition(".")
            ours = names[short] if short in names else f"{names[layer]}.{kind}"
        else:
            continue
        if tensor.dim() == 2 and "position" not in ours:
            bits = tensor.view(torch.int16).numpy().view(np.uint8)
            writer.add_tensor(ours, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:  # llama.cpp wants vectors, positions and the convolution as floats
            writer.add_tensor(ours, tensor.float().numpy())
    target.parent.mkdir(parents=True, exist_ok=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target.with_suffix(".part").rename(target)
    return target


def write_pictures(folder: Path, count: int, seed: int) -> list[Path]:
    """JPEG files of random pictures of 640 x 480 pixels."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    dice = np.random.default_rng(seed)
    paths = []
    for i in range(count):
        coarse = Image.fromarray(dice.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        paths.append(folder / f"{seed}-{i}.jpg")
        coarse.resize((640, 480), Image.Resampling.BICUBIC).save(paths[-1], quality=90)
    return paths
