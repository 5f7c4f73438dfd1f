"""Checks that the tokenizer's vocabulary fits the model's embedding."""

from __future__ import annotations

from mvllm.errors import ModelError


def check_tokenizer(vocab_size: int, tokenizer_len: int, *, tokenizer: str = "the tokenizer") -> None:
    """Checks that every token of the tokenizer has an embedding.

    Fewer tokens than embeddings are permitted: many checkpoints pad their embedding.

    Args:
        vocab_size: Rows of the model's embedding.
        tokenizer_len: The tokenizer's largest token id, plus one.
        tokenizer: Its source, for the message.

    Raises:
        ModelError: The tokenizer has more tokens than the model.
    """
    if tokenizer_len > vocab_size:
        raise ModelError(
            f"{tokenizer} has {tokenizer_len} tokens, but the model's vocabulary (vocab_size in config.json) has only "
            f"{vocab_size}: token ids from {vocab_size} on would have no embedding. Use the tokenizer that the model "
            "was trained with, or resize the model's embedding."
        )
