"""`mvllm show`: facts about a model, without loading its weights."""

from __future__ import annotations

import argparse
import math
from collections import Counter

from mvllm.extension_api import ModelConfig, MvllmError
from mvllm.extension_api.checkpoint_formats import read_checkpoint, source_files
from mvllm.extension_api.cli import EngineArgs, add_positional_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    add_positional_model(parser, "Model folder, GGUF file, name on the hub, or 'demo'.")
    parser.set_defaults(needs_model=True)
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="Fetch the repository's Python files, too; none is run."
    )


def _weights(config: ModelConfig) -> str:
    """How the weights are stored; of matrices in blocks the kinds of blocks, the most frequent first."""
    settings = config.hf_config.get("quantization_config")
    blocks = settings.get("tensors") if isinstance(settings, dict) else None
    if isinstance(blocks, dict) and blocks:
        return ", ".join(name for name, _ in Counter(map(str, blocks.values())).most_common())
    return config.quantization or config.checkpoint_dtype


def _num_parameters(config: ModelConfig) -> int | None:
    """The number of parameters in the checkpoint; None if its weights are not there, or packed in integers."""
    if config.quantization is not None and source_files(config.path) is None:
        return None
    try:
        return sum(math.prod(tensor.shape) for tensor in read_checkpoint(config.path).values())
    except MvllmError:
        return None


def run(args: argparse.Namespace) -> int:
    """Prints one fact per line."""
    settings = EngineArgs.from_kwargs(
        model=args.model,
        trust_remote_code=args.trust_remote_code,
        load_format="dummy",  # fetches no weights
        generation_config="none",
    )
    config = settings.create_model_config()
    files = source_files(config.path)
    count = _num_parameters(config)
    facts = {
        "architecture": config.architecture,
        **({} if count is None else {"parameters": f"{count:,}"}),
        "context length": f"{config.max_model_len:,}",
        "layers": config.num_layers,
        "hidden size": config.hidden_size,
        "attention heads": f"{config.num_heads}, {config.num_kv_heads} of keys and values",
        "vocabulary": f"{config.vocab_size:,}",
        "weights": _weights(config),
        **({"file": ", ".join(map(str, files))} if files else {"folder": config.path}),
    }
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name.ljust(width)}  {value}")
    return 0
