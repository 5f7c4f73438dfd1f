"""The benchmark's models in each engine's format, created in one folder if missing.

<models>/hf/S, hf/M     config.json and safetensors in bf16, random weights of a fixed seed, written by transformers
<models>/hf/S-w8a8      the same as compressed-tensors: int8 weights per output row, activations per token
<models>/ov/S-fp16 ...  converted by the peer's own tools, in its own environment
<models>/gguf/S-bf16.gguf, and S-q4_0.gguf ... that llama.cpp's quantizer makes of it
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.perf import perf_models
from tests.perf.cpu_bench.engines import RUNNERS, Engine

SEED = 20260
LOGIT_DEVIATION = 4.0  # wide enough that the greedy choice has a margin

SHAPES: dict[str, dict] = {
    "S": {  # the shape of the public llama-160m
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "tie_word_embeddings": False,
    },
    "M": {  # the shape of Qwen3-0.6B, with a smaller vocabulary
        "model_type": "qwen3",
        "vocab_size": 32768,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "H": perf_models.SHAPES["hybrid"],  # the shape of granite-4.0-h-350m, with the vocabulary of S
}
MAX_POSITIONS = 4096


def model_for(engine: Engine, models: Path, name: str) -> Path:
    """The folder or file of model `name` for `engine`, created if it is missing.

    Raises:
        subprocess.CalledProcessError: A peer's converter failed; its output is attached.
    """
    if engine.model == "hf":
        return hf_model(models, name)
    if engine.model == "hf-w8a8":
        return w8a8_model(models, name)
    kind, _, quantization = engine.model.partition("-")
    source = hf_model(models, name)
    if kind == "ov":
        target = models / "ov" / f"{name}-{quantization}"
        if not target.exists():
            tool = engine.python.parent / "optimum-cli"
            task = ("--task", "text-generation-with-past", "--weight-format", quantization)
            _convert([tool, "export", "openvino", "-m", source, *task, target], target)
        return target
    return gguf_model(models, name, quantization, engine.python)


def gguf_model(models: Path, name: str, quantization: str, python: Path) -> Path:
    """The GGUF file of model `name`: bf16, or q4_0, q4_k_m or q8_0 by llama.cpp, which `python` has.

    Raises:
        subprocess.CalledProcessError: The conversion failed; its output is attached.
    """
    target = models / "gguf" / f"{name}-{quantization}.gguf"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    if quantization == "bf16":
        _convert([sys.executable, RUNNERS / "write_gguf.py", hf_model(models, name), target], target)
    else:
        whole = gguf_model(models, name, "bf16", python)
        _convert([python, RUNNERS / "quantize_gguf.py", whole, target, quantization], target)
    return target


def hf_model(models: Path, name: str) -> Path:
    """The checkpoint, with a tokenizer of letters and pairs (engines get token ids, but some require a tokenizer)."""
    folder = models / "hf" / name
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(SEED)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    shape = dict(SHAPES[name])
    shape |= {**ids, "max_position_embeddings": MAX_POSITIONS}
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
        model.get_output_embeddings().weight.normal_(0, LOGIT_DEVIATION / config.hidden_size**0.5)
    draft = folder.with_name(name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(draft)
    (draft / "generation_config.json").write_text(json.dumps(ids))
    _write_tokenizer(draft, config.vocab_size)
    draft.replace(folder)
    return folder


def w8a8_model(models: Path, name: str) -> Path:
    """A copy of the checkpoint with int8 matrices in the layers, in the format of llm-compressor."""
    source, folder = hf_model(models, name), models / "hf" / f"{name}-w8a8"
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from safetensors.torch import load_file, save_file

    tensors = {}
    for key, tensor in load_file(source / "model.safetensors").items():
        if not key.endswith("_proj.weight"):
            tensors[key] = tensor
            continue
        scale = tensor.float().abs().amax(dim=1, keepdim=True) / 127
        tensors[key] = (tensor.float() / scale).round().to(torch.int8)
        tensors[key + "_scale"] = scale
    draft = folder.with_name(folder.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(source, draft, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": numbers | {"strategy": "channel", "dynamic": False},
        "input_activations": numbers | {"strategy": "token", "dynamic": True},
    }
    config = json.loads((draft / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (draft / "config.json").write_text(json.dumps(config, indent=1))
    draft.replace(folder)
    return folder


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = list(itertools.islice(itertools.product(letters, letters), vocab_size - len(letters) - 1))
    words = ["<|endoftext|>", *letters, *(a + b for a, b in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|endoftext|>")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_POSITIONS} | special
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _convert(command: list, target: Path) -> None:
    print(f"making {target}", flush=True)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        subprocess.run(
            [str(part) for part in command],
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env | {"HF_HUB_OFFLINE": "1"},
        )
    except BaseException:
        # Remove an incomplete model: it would be used as a complete one.
        shutil.rmtree(target, ignore_errors=True) if target.is_dir() else target.unlink(missing_ok=True)
        raise
