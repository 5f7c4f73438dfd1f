"""The model's tokenizer as the grammar library wants it, wherever the engine core runs."""

from __future__ import annotations

from copy import deepcopy

from mvllm.config.model import ModelConfig
from mvllm.engine.frontend.tokenizer import Tokenizer, load_tokenizer
from mvllm.errors import RequestError
from mvllm.structured_output.vocabulary import Vocabulary


def check_tokenizer_for_grammars(tokenizer: Tokenizer | None) -> None:
    """Returns if outputs of a wanted form can be had with `tokenizer`.

    Raises:
        RequestError: There is none, or it does not say which text its tokens stand for.
    """
    if tokenizer is None:
        raise RequestError(
            "structured_outputs needs a tokenizer, but the engine was started with skip_tokenizer_init.",
            parameter="structured_outputs",
        )
    if tokenizer.backend is None:
        raise RequestError(
            f"structured_outputs needs a tokenizer of the tokenizers library; this model's is a "
            f"{type(tokenizer.hf).__name__}.",
            parameter="structured_outputs",
        )


def load_vocabulary(config: ModelConfig) -> Vocabulary:
    """Loads the model's tokenizer and writes it down.

    Raises:
        RequestError: It cannot be used for this.
    """
    tokenizer = load_tokenizer(config)
    check_tokenizer_for_grammars(tokenizer)
    assert tokenizer is not None
    backend = deepcopy(tokenizer.backend)
    backend.no_padding()
    backend.no_truncation()
    own = tokenizer.eos_token_id
    ends = [*config.eos_token_ids, *([] if own is None else [own])]
    return Vocabulary(
        tokenizer=backend.to_str(),
        vocab_size=config.vocab_size,
        end_ids=sorted({token for token in ends if 0 <= token < min(config.vocab_size, tokenizer.length)}),
    )
