"""Random-weight checkpoints for the benchmarks, written once with transformers and kept in a folder.

small   Llama, 162 M parameters: 12 layers of width 768 (the shape of the public llama-160m)
hybrid  Granite 4, 312 M parameters: 28 layers with Mamba-2 and 4 with attention (the shape of the public
        granite-4.0-h-350m, with the vocabulary of `small`)
tiny    one layer of width 64: almost no arithmetic, so that the time is that of the engine around the model
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "max_position_embeddings": 4096,
    },
    "hybrid": {
        "model_type": "granitemoehybrid",
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "shared_intermediate_size": 2048,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "num_hidden_layers": 32,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "layer_types": ["attention" if layer in (10, 13, 17, 27) else "mamba" for layer in range(32)],
        "mamba_n_heads": 48,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "position_embedding_type": "nope",
        "attention_multiplier": 0.015625,
        "max_position_embeddings": 4096,
    },
    "tiny": {
        "model_type": "llama",
        "vocab_size": 2048,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
}


def checkpoint(name: str) -> Path:
    """The folder of benchmark model `name`, made on first use under MVLLM_BENCH_MODELS or the temporary directory."""
    root = Path(os.environ.get("MVLLM_BENCH_MODELS", Path(tempfile.gettempdir()) / "mvllm-bench-models"))
    folder = root / name
    if (folder / "complete").exists():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(20260)
    shape = dict(SHAPES[name])
    config = AutoConfig.for_model(
        shape.pop("model_type"), **shape, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        # Large enough logits that the greedy choice has a margin.
        model.lm_head.weight.normal_(0, 4.0 / config.hidden_size**0.5)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0})
    )
    (folder / "complete").touch()
    return folder
