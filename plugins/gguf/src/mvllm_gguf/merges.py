"""The merges of BPE vocabularies, from the file or from the scores of a SentencePiece model.

SentencePiece merges the two adjacent tokens whose concatenation is the token with the highest score, the leftmost if
equal. This is equivalent to a list of merges: each split of a token into two tokens, in the order of the scores.
"""

from __future__ import annotations

import numpy as np

from mvllm.extension_api import ModelError, get_logger
from mvllm_gguf.vocabulary import TokenType, Vocabulary

logger = get_logger("mvllm.gguf.merges")

_MOST_WORK = 1 << 27  # sum of squared token lengths; 3e7 in the largest published vocabulary

_MOST_MERGES = 1 << 21  # the largest published vocabulary has 2**19

_MERGED = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
"""Types of tokens that merges produce. Merges never produce control or byte tokens."""


def known_merges(merges: list[str], vocabulary: Vocabulary, where: str) -> list[tuple[str, str]]:
    """The merges of a file (`left right`) whose parts and results are tokens.

    The first of two equal merges counts, as in llama.cpp. Other merges are ignored with a warning: converters rename
    some added tokens, but not in the merges.

    Raises:
        ModelError: There are too many merges; building the tokenizer would take minutes.
    """
    if len(merges) > _MOST_MERGES:
        raise ModelError(f"{where} has {len(merges)} merges; {_MOST_MERGES} are allowed. Download the file again.")
    tokens = set(vocabulary.tokens)
    found: dict[tuple[str, str], None] = {}
    for merge in merges:
        space = merge.find(" ", 1)  # a token may begin with a space
        left, right = merge[:space], merge[space + 1 :]
        if space > 0 and left in tokens and right in tokens and left + right in tokens:
            found[left, right] = None
    if unknown := len(merges) - len(found):
        logger.warning("%s: %d of %d merges are ignored; they are not of two tokens.", where, unknown, len(merges))
    return list(found)


def merges_from_scores(vocabulary: Vocabulary, where: str) -> list[tuple[str, str]]:
    """The merges of a SentencePiece vocabulary, in the order of their priority.

    Splits of one token are sorted by decreasing length of the left part: if two merges overlap in a text, this is the
    one further left.

    Raises:
        ModelError: There are no scores, or tokens are too long; building the list would take minutes.
    """
    if not vocabulary.scores:
        raise ModelError(
            f"{where} has a vocabulary of the kind 'llama' without 'tokenizer.ggml.scores'. Convert it again."
        )
    merged = [i for i, kind in enumerate(vocabulary.types) if kind in _MERGED]
    lengths = np.array([len(vocabulary.tokens[i]) for i in merged], np.int64)
    if int(np.square(lengths).sum()) > _MOST_WORK:
        raise ModelError(
            f"{where} has {len(merged)} tokens with up to {lengths.max()} characters, too long for a vocabulary. "
            "Download or convert the file again."
        )
    parts = {vocabulary.tokens[i] for i in merged}
    pairs: list[tuple[str, str]] = []
    results: list[int] = []
    for i in merged:
        token = vocabulary.tokens[i]
        for end in range(len(token) - 1, 0, -1):
            if (left := token[:end]) in parts and (right := token[end:]) in parts:
                pairs.append((left, right))
                results.append(i)
    order = np.argsort(-np.array(vocabulary.scores)[results], kind="stable")
    return [pairs[i] for i in order.tolist()]
