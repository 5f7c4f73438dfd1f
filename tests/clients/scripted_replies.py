"""A logits processor that makes any model write given replies: a stand-in for the text of a capable model.

The file named by the variable SCRIPTED_REPLIES is a JSON list of [word, reply]. A request gets the first reply whose
word its prompt contains; everything else (scheduler, sampler, detokenizer, parsers, HTTP) is as usual. Without a
matching word the model writes what it likes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from mvllm.demo import demo_model_path
from mvllm.extension_api import LogitsProcessor, LogitsProcessorContext, RowTokens, SamplingParams

if TYPE_CHECKING:
    import torch

VARIABLE = "SCRIPTED_REPLIES"
END = "<|im_end|>"


class ScriptedReplies(LogitsProcessor):
    """Allows one token: the next one of the reply. See LogitsProcessor."""

    reads_tokens = True

    def __init__(self, context: LogitsProcessorContext) -> None:
        super().__init__(context)
        self._tokenizer = Tokenizer.from_file(str(Path(demo_model_path()) / "tokenizer.json"))
        self._rows: dict[int, tuple[list[int], RowTokens]] = {}

    def add_row(self, row: int, params: SamplingParams, tokens: RowTokens) -> bool:
        """Adds a row whose prompt contains the word of a reply."""
        prompt = self._tokenizer.decode(tokens.prompt.tolist(), skip_special_tokens=False)
        replies = json.loads(Path(os.environ[VARIABLE]).read_text(encoding="utf-8"))
        for word, reply in replies:
            if word in prompt:
                self._rows[row] = self._tokenizer.encode(reply + END, add_special_tokens=False).ids, tokens
                return True
        return False

    def remove_row(self, row: int) -> None:
        """Removes the row."""
        del self._rows[row]

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Blocks every token but the next one of each row's reply."""
        for line, row in enumerate(rows):
            ids, tokens = self._rows[row]
            token = ids[min(len(tokens.output), len(ids) - 1)]
            logits[line] = float("-inf")
            logits[line, token] = 0.0
        return logits
