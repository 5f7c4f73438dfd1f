"""Measures with llama.cpp what tests/published compares with, and prints it as JSON: the content of llama_cpp.json.

It needs llama-cpp-python, which the development environment does not have:

    python -m tests.published.measure SMOLLM2.gguf GEMMA.gguf > tests/published/llama_cpp.json

llama.cpp rounds activations to 8 bits where weights are quantized, which mvllm does not. The perplexity is therefore
measured with the dequantized weights as well, which llama.cpp multiplies in float32.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

from tests.published.texts import HARD, PASSAGE


def dequantize(source: Path, target: Path) -> Path:
    """Writes a GGUF file with the same metadata and tensors in float32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, arch=reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=field.types[-1] if is_array else None)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def load(path: Path) -> llama_cpp.Llama:
    return llama_cpp.Llama(str(path), n_ctx=1024, n_batch=1024, logits_all=True, verbose=False)


def tokenize(model: llama_cpp.Llama, text: str) -> list[int]:
    return list(model.tokenize(text.encode(), add_bos=True, special=True))


def perplexity(model: llama_cpp.Llama) -> float:
    """Perplexity of the tokens of `PASSAGE` after the first one."""
    ids = tokenize(model, PASSAGE)
    model.eval(ids)
    logits = np.array(model.scores[: len(ids) - 1], dtype=np.float64)
    largest = logits.max(-1, keepdims=True)
    normalizer = np.log(np.exp(logits - largest).sum(-1)) + largest[:, 0]
    return math.exp((normalizer - logits[np.arange(len(ids) - 1), ids[1:]]).mean())


def measure(path: Path) -> dict[str, object]:
    """Token ids of `HARD`, number of tokens of `PASSAGE`, and its perplexity as stored and with dequantized weights."""
    model = load(path)
    with tempfile.TemporaryDirectory() as folder:
        of_values = perplexity(load(dequantize(path, Path(folder) / "float32.gguf")))
    return {
        "ids": tokenize(model, HARD),
        "passage_tokens": len(tokenize(model, PASSAGE)),
        "perplexity": perplexity(model),
        "perplexity_float32": of_values,
    }


def main() -> None:
    models = {name: measure(Path(path)) for name, path in zip(("smollm2", "gemma"), sys.argv[1:], strict=True)}
    print(json.dumps({"version": f"llama-cpp-python {llama_cpp.__version__}", "models": models}))


if __name__ == "__main__":
    main()
