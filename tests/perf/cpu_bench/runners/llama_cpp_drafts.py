"""llama.cpp with and without its n-gram drafts, one request at a time: called by tests/perf/speculative.py.

Reads {"model", "threads", "prompts", "num_tokens", "num_drafts"} as JSON from standard input and prints {"tokens",
"seconds", "num_steps"}. Drafts are those of llama-cpp-python's LlamaPromptLookupDecoding. The model's steps go through
the C interface, without the copies of logits that the Python class makes. Generation is greedy, and the first prompt
runs once before the clock starts.
"""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from run_llama_cpp import Sequences


class Sequence(Sequences):
    """One sequence, whose steps give the most likely token behind each of their tokens."""

    def run(self, tokens: list[int], start: int) -> list[int]:
        """Runs the tokens at the positions from `start` on, after removing what is there."""
        api, batch = self._api, self._batch
        api.llama_memory_seq_rm(self.memory, 0, start, -1)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, start + i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        batch.n_tokens = len(tokens)
        if status := api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        rows = (api.llama_get_logits_ith(self._context, i) for i in range(len(tokens)))
        return [int(np.ctypeslib.as_array(row, (self._vocab_size,)).argmax()) for row in rows]


def generate(sequence: Sequence, prompt: list[int], num_tokens: int, num_drafts: int) -> tuple[list[int], int]:
    """The tokens behind the prompt, and the number of steps."""
    lookup = LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=num_drafts) if num_drafts else None
    sequence.clear()
    last = sequence.compute([(token, i, 0, int(i == len(prompt) - 1)) for i, token in enumerate(prompt)])
    tokens, num_steps = [*prompt, last[0]], 1
    while (left := len(prompt) + num_tokens - len(tokens)) > 0:
        drafts = [] if lookup is None else lookup(np.array(tokens, dtype=np.intc)).tolist()[: left - 1]
        found = sequence.run([tokens[-1], *drafts], len(tokens) - 1)
        num_right = next((i for i, draft in enumerate(drafts) if draft != found[i]), len(drafts))
        tokens += found[: num_right + 1]
        num_steps += 1
    return tokens[len(prompt) :], num_steps


def main() -> None:
    asked = SimpleNamespace(**json.load(sys.stdin))
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, None)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(asked.model.encode(), llama_cpp.llama_model_default_params())
    longest = max(map(len, asked.prompts)) + asked.num_tokens + asked.num_drafts
    sequence = Sequence(llama_cpp, model, asked.threads, 1, longest, unified=False)
    generate(sequence, asked.prompts[0], asked.num_tokens, asked.num_drafts)
    start = time.perf_counter()
    found = [generate(sequence, prompt, asked.num_tokens, asked.num_drafts) for prompt in asked.prompts]
    seconds = time.perf_counter() - start
    tokens, steps = zip(*found, strict=True)
    print(json.dumps({"tokens": tokens, "seconds": seconds, "num_steps": sum(steps)}))


if __name__ == "__main__":
    main()
