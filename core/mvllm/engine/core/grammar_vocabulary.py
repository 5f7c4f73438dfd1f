"""The vocabulary that the grammar library needs, made from the model's tokenizer in the engine core's process."""

from __future__ import annotations

from copy import deepcopy

from mvllm.config.model import ModelConfig
from mvllm.engine.tokenizer.tokenizer import check_supports_grammars, load_tokenizer
from mvllm.structured_output.vocabulary import Vocabulary


def load_vocabulary(config: ModelConfig) -> Vocabulary:
    """Loads the model's tokenizer and serializes it for the grammar library.

    Raises:
        RequestError: Structured outputs do not support this tokenizer.
    """
    tokenizer = load_tokenizer(config)
    check_supports_grammars(tokenizer)
    assert tokenizer is not None
    backend = deepcopy(tokenizer.backend)
    backend.no_padding()
    backend.no_truncation()
    eos = tokenizer.eos_token_id
    ends = [*config.eos_token_ids, *([] if eos is None else [eos])]
    return Vocabulary(
        tokenizer=backend.to_str(),
        vocab_size=config.vocab_size,
        end_ids=sorted({token for token in ends if 0 <= token < min(config.vocab_size, tokenizer.length)}),
    )
