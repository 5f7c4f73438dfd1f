"""`mvllm show`: facts about a model, without loading its weights."""

from __future__ import annotations

import argparse

from mvllm.extension_api.cli import EngineArgs, add_positional_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    add_positional_model(parser, "Model folder, GGUF file, name on the hub, or 'demo'.")
    parser.set_defaults(needs_model=True)
    parser.add_argument("--trust-remote-code", action="store_true", help="Fetch the repository's Python files, too; none is run.")


def run(args: argparse.Namespace) -> int:
    """Prints one fact per line."""
    settings = EngineArgs.from_kwargs(
        model=args.model,
        trust_remote_code=args.trust_remote_code,
        load_format="dummy",  # fetches no weights
        generation_config="none",
    )
    config = settings.create_model_config()
    facts = {
        "architecture": config.architecture,
        "context length": f"{config.max_model_len:,}",
        "layers": config.num_layers,
        "hidden size": config.hidden_size,
        "attention heads": f"{config.num_heads}, {config.num_kv_heads} of keys and values",
        "vocabulary": f"{config.vocab_size:,}",
        "weights": config.quantization or config.checkpoint_dtype,
        "folder": config.path,
    }
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name.ljust(width)}  {value}")
    return 0
