"""Do tokenizer and model speak of the same tokens?"""

from __future__ import annotations

from mvllm.errors import ModelError


def check_tokenizer(vocab_size: int, tokenizer_len: int, *, tokenizer: str = "the tokenizer") -> None:
    """Refuses a tokenizer that can produce tokens the model has no embedding for.

    Fewer tokens than embeddings are fine: many checkpoints pad their embedding.

    Args:
        vocab_size: Rows of the model's embedding.
        tokenizer_len: The tokenizer's largest token id, plus one.
        tokenizer: Where it came from, for the message.

    Raises:
        ModelError: The tokenizer has more tokens than the model.
    """
    if tokenizer_len > vocab_size:
        raise ModelError(
            f"{tokenizer} has {tokenizer_len} tokens, but the model's vocabulary (vocab_size in config.json) has only "
            f"{vocab_size}: token ids from {vocab_size} on would have no embedding. Use the tokenizer that the model "
            "was trained with, or resize the model's embedding."
        )
