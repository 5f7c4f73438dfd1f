"""Quantizes a GGUF file with llama.cpp's quantizer, in its Python: quantize_gguf.py SOURCE TARGET q4_0|q4_k_m|q8_0."""

from __future__ import annotations

import sys

import llama_cpp

TYPES = {
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
}


def main() -> None:
    source, target, kind = sys.argv[1:]
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread, params.ftype = 2, TYPES[kind]
    status = llama_cpp.llama_model_quantize(source.encode(), target.encode(), params)
    if status:
        raise SystemExit(f"llama_model_quantize returned {status}")


if __name__ == "__main__":
    main()
