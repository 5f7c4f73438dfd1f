"""LoRA adapters with random values for the zoo's checkpoints, in PEFT's format; and models with them merged.

transformers on the merged weights is the oracle. It scores the engine's own output token by token, so that a tie does
not make the two sequences diverge.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mvllm import RequestOutput
from tests.helpers.model_zoo import load_reference

PREFIX = "base_model.model."
LLAMA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TOLERANCE = 1e-3


def linears(model: nn.Module, targets: Sequence[str]) -> dict[str, nn.Module]:
    """The linear layers whose names end in one of `targets`."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and f".{name}".endswith(tuple(f".{target}" for target in targets))
    }


def write_adapter(
    folder: Path,
    checkpoint: Path,
    *,
    targets: Sequence[str] = LLAMA_TARGETS,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    size: float = 0.5,
    ranks: dict[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    model: PreTrainedModel | None = None,
    **config: Any,
) -> Path:
    """Writes an adapter as PEFT saves it.

    Args:
        ranks: LoRA ranks by module name suffix, if they differ.
        model: The checkpoint's model; None loads it.
        size: Scale of the weight delta: about this times a random matrix of the layer's shape.
        config: Further keys of its configuration.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in linears(model or load_reference(checkpoint), targets).items():
        out_features, in_features = module.weight.shape if isinstance(module, nn.Linear) else module.weight.shape[::-1]
        r = (ranks or {}).get(name.rsplit(".", 1)[-1], rank)
        down = torch.randn(r, in_features, generator=generator) * in_features**-0.5
        up = torch.randn(out_features, r, generator=generator) * size * r**-0.5
        tensors[f"{PREFIX}{name}.lora_A.weight"] = down.to(dtype)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = up.to(dtype)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "somewhere/else",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "target_modules": list(targets),
        "bias": "none",
        "rank_pattern": ranks or {},
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "fan_in_fan_out": False,
        "inference_mode": True,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def edit_config(folder: Path, **settings: Any) -> None:
    """Changes keys of an adapter's configuration."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def merged(checkpoint: Path, adapter: Path | None, model: PreTrainedModel | None = None) -> PreTrainedModel:
    """The checkpoint's model, or a given one, with the adapter merged into its weights: W + scale · B · A."""
    model = load_reference(checkpoint) if model is None else model
    if adapter is None:
        return model
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    modules = dict(model.named_modules())
    for name in [name for name in tensors if name.endswith("lora_A.weight")]:
        down, up = tensors[name].double(), tensors[name.replace("lora_A", "lora_B")].double()
        module = modules[name.removeprefix(PREFIX).removesuffix(".lora_A.weight")]
        kind = name.split(".")[-3]
        alpha, rank = config["alpha_pattern"].get(kind, config["lora_alpha"]), down.shape[0]
        delta = (up @ down) * (alpha / (math.sqrt(rank) if config["use_rslora"] else rank))
        with torch.no_grad():
            module.weight += (delta.T if isinstance(module, Conv1D) else delta).to(module.weight.dtype)
    return model


@torch.inference_mode()
def check_against(model: PreTrainedModel, outputs: Sequence[RequestOutput], where: str = "") -> None:
    """Asserts that greedy outputs and log-probabilities equal the model's."""
    for output in outputs:
        found = output.outputs[0]
        prompt, tokens = output.prompt_token_ids, list(found.token_ids)
        assert tokens and found.logprobs is not None
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        logprobs = torch.log_softmax(logits, dim=-1)
        for position, (token, entries) in enumerate(zip(tokens, found.logprobs, strict=True)):
            reference = logprobs[position]
            assert float(reference.max() - reference[token]) < TOLERANCE, f"{where}: token {position} is not the best"
            for each, entry in entries.items():
                assert abs(entry.logprob - float(reference[each])) < TOLERANCE, f"{where}: token {position}"
