"""Tiny random encoders and classifiers, made with transformers, and transformers' outputs for prompts."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

VOCAB_SIZE = 320
PAD, UNK, CLS, SEP, MASK = range(5)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

_BERT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "pad_token_id": PAD,
}
_DISTIL = {
    "vocab_size": VOCAB_SIZE,
    "dim": 64,
    "hidden_dim": 96,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 130,
    "pad_token_id": PAD,
}
_LLAMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": CLS,
    "eos_token_id": SEP,
    "pad_token_id": PAD,
}
_CONFIGS: dict[str, Callable[..., Any]] = {
    "Bert": functools.partial(transformers.BertConfig, **_BERT),
    "Roberta": functools.partial(transformers.RobertaConfig, **_BERT | {"pad_token_id": 1, "type_vocab_size": 1}),
    "XLMRoberta": functools.partial(transformers.XLMRobertaConfig, **_BERT | {"pad_token_id": 1, "type_vocab_size": 1}),
    "DistilBert": functools.partial(transformers.DistilBertConfig, **_DISTIL),
    "Llama": functools.partial(transformers.LlamaConfig, **_LLAMA),
    "Mistral": functools.partial(transformers.MistralConfig, **_LLAMA),
    "Qwen2": functools.partial(transformers.Qwen2Config, **_LLAMA),
    "Qwen3": functools.partial(transformers.Qwen3Config, **_LLAMA, head_dim=16),
    "Qwen3Next": functools.partial(
        transformers.Qwen3NextConfig,
        **_LLAMA,
        head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
}
_HEADS = ("ForSequenceClassification", "ForMaskedLM", "Model")


@functools.cache
def checkpoint(architecture: str, *, labels: int = 2, tokenizer: bool = False, **settings: Any) -> Path:
    """A folder with a random-weight model, created once.

    Args:
        labels: Labels of a classifier.
        tokenizer: Whether to add a tokenizer with one token per character.
        settings: Config settings.
    """
    [head] = [head for head in _HEADS if architecture.endswith(head)]
    config = _CONFIGS[architecture.removesuffix(head)](num_labels=labels, **settings)
    torch.manual_seed(sum(map(ord, architecture)) + labels)
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for (
            name,
            parameter,
        ) in model.named_parameters():  # large enough that attention is peaked and norms and biases matter
            if parameter.dim() > 1:
                parameter.normal_(std=1.2 * parameter.shape[1] ** -0.5)
            else:
                parameter.normal_(mean=float(name.endswith("weight")), std=0.2)
    folder = Path(tempfile.mkdtemp(prefix="mvllm-encoders-"))
    model.save_pretrained(folder)
    if tokenizer:
        write_tokenizer(folder)
    return folder


@functools.cache
def reference(folder: Path) -> Any:
    """The model of a folder as transformers loads it."""
    [name] = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def states(folder: Path, prompts: Sequence[list[int]]) -> list[np.ndarray]:
    """The last hidden states of each prompt: float64 [length, hidden_size]."""
    model = reference(folder).base_model
    return [model(torch.tensor([prompt])).last_hidden_state[0].double().numpy() for prompt in prompts]


@torch.inference_mode()
def logits(folder: Path, prompts: Sequence[list[int]], **inputs: Any) -> np.ndarray:
    """Logits of a classifier for each prompt: float64 [prompts, labels]."""
    found = [reference(folder)(torch.tensor([prompt]), **inputs).logits[0].double().numpy() for prompt in prompts]
    return np.stack(found)


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random prompts, without special tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(len(SPECIAL), VOCAB_SIZE) for _ in range(length)] for length in lengths]


def write_tokenizer(folder: Path) -> None:
    """A tokenizer with one token per ASCII character and BERT's special tokens."""
    vocabulary = {token: i for i, token in enumerate(SPECIAL)}
    for code in range(33, 127):
        vocabulary[chr(code)] = len(vocabulary)
        vocabulary[f"##{chr(code)}"] = len(vocabulary)
    fast = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    fast.normalizer = normalizers.BertNormalizer(lowercase=True)
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece()
    fast.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, mask_token="[MASK]", model_input_names=inputs, **names
    )
    made.save_pretrained(folder)
