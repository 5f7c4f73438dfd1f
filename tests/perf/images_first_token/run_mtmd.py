"""llama.cpp's runner, through the C interface of libmtmd: run_mtmd.py TEXT PROJECTOR --threads N PICTURE ..."""

from __future__ import annotations

import argparse
import ctypes
import json
import time

import llama_cpp
import numpy as np
from llama_cpp import mtmd_cpp as mtmd

BATCH = 512

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("text")
    parser.add_argument("projector")
    parser.add_argument("--threads", type=int)
    parser.add_argument("pictures", nargs="+")
    args = parser.parse_args()
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(args.text.encode(), llama_cpp.llama_model_default_params())
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = 1024, BATCH, BATCH
    settings.n_threads = settings.n_threads_batch = args.threads
    context = llama_cpp.llama_init_from_model(model, settings)
    vision = mtmd.mtmd_context_params_default()
    vision.use_gpu, vision.n_threads, vision.print_timings = False, args.threads, False
    tower = mtmd.mtmd_init_from_file(args.projector.encode(), model, vision)
    marker = mtmd.mtmd_default_marker()
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    seconds = []
    for i, name in enumerate([args.pictures[-1], *args.pictures[:-1]]):
        letters = "".join(chr(97 + (7 * i + j) % 26) + " " for j in range(16)).encode()
        text = letters[:8] + marker + letters[8:]
        start = time.perf_counter()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        bitmap = mtmd.mtmd_helper_bitmap_init_from_file(tower, name.encode(), False)
        chunks = mtmd.mtmd_input_chunks_init()
        given = mtmd.mtmd_input_text(text, len(text), True, True)
        failed = mtmd.mtmd_tokenize(
            tower, chunks, ctypes.byref(given), (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap), 1
        ) or mtmd.mtmd_helper_eval_chunks(
            tower, context, chunks, 0, 0, BATCH, True, ctypes.byref(llama_cpp.llama_pos(0))
        )
        if failed:
            raise RuntimeError(f"llama.cpp failed on {name}: {failed}")
        logits = llama_cpp.llama_get_logits_ith(context, -1)
        np.ctypeslib.as_array(logits, (llama_cpp.llama_vocab_n_tokens(vocabulary),)).argmax()
        seconds.append(time.perf_counter() - start)
        mtmd.mtmd_input_chunks_free(chunks)
        mtmd.mtmd_bitmap_free(bitmap)
    print(json.dumps(seconds[2:]))
