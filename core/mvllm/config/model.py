"""ModelConfig: the configuration of one model. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mvllm.config.hf_config import HFConfig
from mvllm.config.model_kind import ModelKind
from mvllm.config.multimodal import MultiModalModel
from mvllm.config.token_spaces import TokenSpace


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of one model.

    Attributes:
        model: The user's setting (folder or hub name).
        path: The model folder.
        tokenizer: Folder or name of the tokenizer (None with `skip_tokenizer_init`).
        hf_config: The parsed `config.json`.
        architecture: The entry of `architectures` that a model class is registered for.
        dtype: Compute dtype by name: `float32`, `bfloat16` or `float16`. `auto` until the platform's plan is
            applied.
        checkpoint_dtype: The weights' dtype in `config.json`.
        max_model_len: Longest sequence, prompt and output together, in tokens.
        max_model_len_is_auto: The engine core lowers it to what fits into the KV cache.
        vocab_size: Rows of the token embedding.
        hidden_size, num_layers, num_heads, num_kv_heads, head_size: The transformer's shape.
        sliding_window: Window in tokens of the layers that have one, or None.
        max_logprobs: Largest `logprobs` that a request may ask for.
        logprobs_mode: What `logprobs` of sampled tokens are computed from, one of LOGPROBS_MODES.
        generation_defaults: Sampling defaults from `generation_config.json` (only keys that SamplingParams has).
        eos_token_ids: Tokens that end a sequence, from `generation_config.json` and `config.json`.
        trust_remote_code: Whether code from the model folder may run.
        model_impl: Implementation of the model: `native` (core's or a plugin's), the name of a ModelImplementation
            (`transformers`), or `auto`: native if the architecture has a class, else `transformers`.
        revision: Revision on the hub.
        seed: Seed of the samples of requests without a seed of their own.
        seed_is_random: Whether it was drawn at this start, because none was given.
        quantization: Name of the method of quantized weights, or of online quantization; None for unquantized weights.
        kind: Whether it generates, embeds or classifies.
        pooler_config: The user's pooling settings, which override the model's sentence-transformers files.
        token_spaces: Spaces of tokens beside text, by name.
        multimodal: What the model takes beside text; None for text alone.
        language_architecture: Of multimodal checkpoints: the architecture of the language model in it. It stays if
            `multimodal` is taken away, so that the checkpoint is used for text alone.
    """

    model: str
    path: Path
    tokenizer: str | None
    hf_config: HFConfig
    architecture: str
    dtype: str
    max_model_len: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    sliding_window: int | None = None
    max_logprobs: int = 20
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    trust_remote_code: bool = False
    model_impl: str = "auto"
    revision: str | None = None
    seed: int = 0
    checkpoint_dtype: str = "float32"
    quantization: str | None = None
    kind: ModelKind = field(default_factory=ModelKind)
    pooler_config: dict[str, Any] = field(default_factory=dict)
    seed_is_random: bool = False
    logprobs_mode: str = "raw_logprobs"
    token_spaces: dict[str, TokenSpace] = field(default_factory=dict)
    multimodal: MultiModalModel | None = None
    language_architecture: str = ""
    max_model_len_is_auto: bool = False

    @property
    def has_non_causal_spans(self) -> bool:
        """Whether the positions of an image see each other in both directions."""
        return self.multimodal is not None and self.multimodal.spans_attend_both_ways

    @property
    def num_token_ids(self) -> int:
        """Number of token ids of all spaces: columns of logits and masks. Without spaces behind it, `vocab_size`."""
        return max([self.vocab_size, *(space.stop for space in self.token_spaces.values())])

    @property
    def weights_seed(self) -> int:
        """Seed of random weights. Independent of a drawn seed, so that every start has the same model."""
        return 0 if self.seed_is_random else self.seed
