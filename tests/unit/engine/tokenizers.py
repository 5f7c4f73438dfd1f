"""Small tokenizers of the kinds that models use, built on demand."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mvllm.engine.tokenizer import tokenizer as engine_tokenizer

_TEXTS = [
    "Hello world, this is a small text. The cat sat on the mat; it didn't move at all.",
    "Grüße aus Köln, naïve café, 你好世界, привет мир, नमस्ते, 👩‍👩‍👧 🎉🎉 emoji",
    "def f(x):\n    return x + 1\n\n\nprint(f(41))",
] * 20

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(vocab_size: int = 500) -> Tokenizer:
    """Like Llama 3, Qwen and GPT-2: tokens are pieces of UTF-8."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return tokenizer


def byte_fallback(vocab_size: int = 500, *, split: bool = False) -> Tokenizer:
    """Like Llama 2 and Mistral: words begin with a mark, unknown characters are sequences of byte tokens.

    Args:
        split: Whether tokens are within words.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if split:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = [AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*special, *(AddedToken(f"<0x{i:02X}>") for i in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator([t.replace(" ", "▁") for t in _TEXTS[:1]], trainer)
    # The byte tokens are part of the vocabulary of such tokenizers, not added to it.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if not t["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(state))


def gemma(vocab_size: int = 500) -> Tokenizer:
    """Like Gemma: spaces are marks, no mark before the first word, unknown characters are sequences of byte tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = [AddedToken(t, special=True) for t in ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<image>")]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*special, *(AddedToken(f"<0x{i:02X}>") for i in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator([t.replace(" ", "▁") for t in _TEXTS[:1]], trainer)
    bos = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos>:0 $A:0", pair="<bos>:0 $A:0 <bos>:1 $B:1", special_tokens=[("<bos>", bos)]
    )
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if not t["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(state))


def metaspace(vocab_size: int = 300) -> Tokenizer:
    """Like T5 and newer sentencepiece conversions: the decoder treats the first token differently."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return tokenizer


def marks_first(vocab_size: int = 500) -> Tokenizer:
    """Like newer conversions of Llama 2: the pre-tokenizer puts a mark before the first word of the text alone."""
    state = json.loads(byte_fallback(vocab_size, split=True).to_str())
    state["normalizer"] = None
    state["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    bos = state["model"]["vocab"]["<s>"]
    state["post_processor"] = json.loads(
        processors.TemplateProcessing(single="<s>:0 $A:0", special_tokens=[("<s>", bos)]).__getstate__()
    )
    return Tokenizer.from_str(json.dumps(state))


def marks_never(vocab_size: int = 300) -> Tokenizer:
    """Unigram without a mark before the first word: the decoder keeps the space of the first token."""
    tokenizer = metaspace(vocab_size)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    return tokenizer


def wordpiece(vocab_size: int = 300) -> Tokenizer:
    """Like BERT: tokens within words begin with ##, and the decoder puts spaces between the other ones."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return tokenizer


def word_suffix(vocab_size: int = 300) -> Tokenizer:
    """Like GPT-1: a mark ends each word, and becomes a space only when another token follows."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return tokenizer


def qwen2(vocab_size: int = 500) -> Tokenizer:
    """As Qwen 2: tokens are pieces of UTF-8, in NFC; words do not begin with several spaces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return tokenizer


KINDS = {
    f.__name__: f
    for f in (
        byte_level,
        byte_fallback,
        marks_first,
        metaspace,
        marks_never,
        wordpiece,
        word_suffix,
        gemma,
        qwen2,
    )
}

_SPECIAL = {
    "byte_level": {"eos_token": "<|end|>"},
    "byte_fallback": {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"},
    "marks_first": {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"},
    "metaspace": {"eos_token": "</s>", "unk_token": "<unk>"},
    "marks_never": {"eos_token": "</s>", "unk_token": "<unk>"},
    "wordpiece": {"eos_token": "[SEP]", "unk_token": "[UNK]"},
    "word_suffix": {"unk_token": "<unk>"},
    "qwen2": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "gemma": {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "bos", "unk", "mask")},
}


@functools.cache
def _trained(kind: str) -> str:
    """The tokenizer as JSON. Trained once, because training breaks ties randomly."""
    return str(KINDS[kind]().to_str())


def make_hf_tokenizer(kind: str = "byte_level", chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A transformers tokenizer of one of KINDS."""
    hf = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_trained(kind)), **_SPECIAL[kind])
    hf.chat_template = chat_template
    return hf


@functools.cache
def make_tokenizer(kind: str = "byte_level", chat_template: str | None = None) -> engine_tokenizer.Tokenizer:
    """A Tokenizer of the engine."""
    return engine_tokenizer.Tokenizer(lambda: make_hf_tokenizer(kind, chat_template))


def save_tokenizer(folder: Path, kind: str = "byte_level", chat_template: str | None = None) -> None:
    """Writes its files into a model folder."""
    make_hf_tokenizer(kind, chat_template).save_pretrained(str(folder))
