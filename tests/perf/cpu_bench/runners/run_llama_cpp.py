"""Runner of llama.cpp through llama-cpp-python's C interface, with one slot per request as in a server.

Prompts are packed into batches of 2,048 tokens, then each step has one token of every sequence. A prefix that the
prompts share is computed once, and all sequences share its cells.
"""

from __future__ import annotations

import argparse
import ctypes

from protocol import Generate, imports_done, serve

BATCH = 2048
UBATCH = 512


class Sequences:
    """A context for several sequences, with the batch buffers to run them.

    Args:
        api: The module llama_cpp.
        model: The loaded model.
        threads: Threads to compute with.
        count: Number of sequences.
        length: Maximum tokens of each.
        unified: One pool of cells for all sequences, which prefix sharing requires; otherwise one stream of cells per
        sequence.
    """

    def __init__(self, api: object, model: object, threads: int, count: int, length: int, unified: bool) -> None:
        import numpy as np

        self._np, self._api = np, api
        params = api.llama_context_default_params()
        params.n_ctx = count * (-(-length // 256) * 256)
        params.n_batch, params.n_ubatch, params.n_seq_max = BATCH, UBATCH, count
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = unified
        params.flash_attn_type = 1
        self._context = api.llama_init_from_model(model, params)
        if not self._context:
            raise MemoryError(f"llama.cpp made no context for {count} sequences of {length} tokens")
        self._batch = api.llama_batch_init(BATCH, 0, 1)
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self.memory = api.llama_get_memory(self._context)

    def clear(self) -> None:
        """Removes all tokens."""
        self._api.llama_memory_clear(self.memory, True)

    def compute(self, items: list) -> dict:
        """Runs (token, position, sequence, whether logits are needed); returns sequence -> most likely next token."""
        found: dict = {}
        for begin in range(0, len(items), BATCH):
            piece, batch = items[begin : begin + BATCH], self._batch
            for i, (token, position, sequence, wanted) in enumerate(piece):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.n_tokens = len(piece)
            status = self._api.llama_decode(self._context, batch)
            if status:
                raise RuntimeError(f"llama_decode returned {status}")
            for i, (_, _, sequence, wanted) in enumerate(piece):
                if wanted:
                    row = self._api.llama_get_logits_ith(self._context, i)
                    found[sequence] = int(self._np.ctypeslib.as_array(row, (self._vocab_size,)).argmax())
        return found

    def close(self) -> None:
        """Frees the context."""
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)


def load(args: argparse.Namespace) -> tuple[Generate, str, str]:
    import llama_cpp as api
    import numpy as np  # noqa: F401  (for the logits)

    imports_done()
    silent = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(silent, ctypes.c_void_p(0))
    api.llama_backend_init()
    model = api.llama_model_load_from_file(str(args.model).encode(), api.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {args.model}")
    kept: dict = {}

    def sequences(count: int, length: int, unified: bool) -> Sequences:
        key = (count, -(-length // 256), unified)  # a context of as many cells
        if key not in kept:
            while kept:
                kept.popitem()[1].close()
            kept[key] = Sequences(api, model, args.threads, count, length, unified)
        return kept[key]

    def generate(prompts: list, output: int, shared: int) -> list:
        count = len(prompts)
        run = sequences(count, max(map(len, prompts)) + output, unified=bool(shared))
        run.clear()
        if shared:
            run.compute([(token, i, 0, 0) for i, token in enumerate(prompts[0][:shared])])
            for sequence in range(1, count):
                api.llama_memory_seq_cp(run.memory, 0, sequence, -1, -1)
        last = run.compute(
            [
                (token, i, sequence, int(i == len(ids) - 1))
                for sequence, ids in enumerate(prompts)
                for i, token in enumerate(ids)
                if i >= shared
            ]
        )
        tokens = [[last[sequence]] for sequence in range(count)]
        for step in range(output - 1):
            last = run.compute([(tokens[s][-1], len(prompts[s]) + step, s, 1) for s in range(count)])
            for sequence in range(count):
                tokens[sequence].append(last[sequence])
        return tokens

    generate.silent = silent  # the library calls it for as long as the process lives
    system = api.llama_print_system_info().decode().strip().rstrip("|").strip()
    return generate, api.__version__, f"flash attention, a stream of cells per sequence; {system}"


if __name__ == "__main__":
    serve(load)
