"""Has transformers read a GGUF file and write its model as a folder in float32: python convert.py FILE FOLDER.

A program of its own, since transformers needs accelerate for it, which the environment of the tests does not have.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main(file: Path, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # The values are dequantized, which transformers does not note: it refuses to write what it takes for quantized.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
