"""Whether two model folders have the same tokens, as their `tokenizer.json` say. Needs no tokenizer library."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any

from mvllm.config.hf_config import read_json_object
from mvllm.errors import ModelError

_FILE = "tokenizer.json"
_PIECE = 0


def first_difference(folder: Path, other: Path) -> tuple[int, str, str] | None:
    """The first token id that means something else in two folders, and its tokens there.

    Ids that only one of them has do not count: vocabularies may be padded.

    Returns:
        None if there is none, or if a folder has no `tokenizer.json` that can be read.
    """
    files = folder / _FILE, other / _FILE
    if not all(file.is_file() for file in files) or filecmp.cmp(*files, shallow=False):
        return None
    tokens, theirs = (_tokens_by_id(file) for file in files)
    for id_ in sorted(tokens.keys() & theirs.keys()):
        if tokens[id_] != theirs[id_]:
            return id_, tokens[id_], theirs[id_]
    return None


def _tokens_by_id(file: Path) -> dict[int, str]:
    """The tokens of a file by their ids; none if it has another form."""
    try:
        values = read_json_object(file)
    except ModelError:
        return {}  # who needs the tokenizer reports it
    model: Any = values.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    found: dict[int, str] = {}
    if isinstance(vocab, dict):  # BPE, WordPiece: token to id
        found = {id_: token for token, id_ in vocab.items() if isinstance(id_, int)}
    elif isinstance(vocab, list):  # Unigram: pairs of token and score
        found = {i: pair[_PIECE] for i, pair in enumerate(vocab) if isinstance(pair, list) and pair}
    added = values.get("added_tokens")
    for each in added if isinstance(added, list) else ():
        if isinstance(each, dict) and isinstance(each.get("id"), int) and isinstance(each.get("content"), str):
            found[each["id"]] = each["content"]
    return found
