"""Datasets of a benchmark: random prompts, with pictures or without, a ShareGPT file, or the built-in prompts.

Each request has its prompt as text and, with a tokenizer, as token ids. Servers receive the text, an engine in this
process the ids. Equal seeds give equal requests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mvllm.extension_api import ConfigError

if TYPE_CHECKING:
    import numpy as np

WITH_IMAGES = "random-mm"
DATASETS = ("random", "sharegpt", "prefix_repetition", "builtin", WITH_IMAGES)
DEFAULT_INPUT_LEN = 1024
DEFAULT_OUTPUT_LEN = 128
DEFAULT_PREFIX_LEN = 256

# Limits in tokens for conversations of a file. They are those of common benchmarks, so that results are comparable.
_SHORTEST = 4
_LONGEST_PROMPT = 1024
_LONGEST_TOTAL = 2048

_CANDIDATES = 8192
_ROUNDS = 10

BUILTIN_PROMPTS = (
    "Explain in simple words how a sailing boat can move against the wind.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "What are the differences between a list and a tuple in Python, and when should each be used?",
    "Summarize the causes of the industrial revolution in five sentences.",
    "Translate into French: The train to the mountains leaves at a quarter past seven in the morning.",
    "A shop sells pencils at 3 for 2 coins. How many coins do 27 pencils cost? Show each step.",
    "Give me a recipe for a vegetable soup that takes less than half an hour.",
    "Write a function that returns the n-th Fibonacci number without recursion, and explain how fast it is.",
    "Why is the sky blue during the day and red in the evening?",
    "Draft a polite letter to a neighbour whose dog barks every night.",
    "List ten names for a small bookshop by the sea, each with a reason.",
    "What happens, step by step, when I type an address into a browser and press enter?",
    "Compare trains and aeroplanes for journeys of about five hundred kilometres.",
    "Write a poem of eight lines about the first snow of the year.",
    "How do vaccines teach the immune system to recognize a virus?",
    "Plan a weekend in a city that you have never seen, for two people who like music and walking.",
)


@dataclass(frozen=True)
class SampleRequest:
    """One request.

    Attributes:
        prompt: The text.
        token_ids: Token ids of the text, without special tokens; None without a tokenizer.
        output_len: Number of output tokens to request.
        images: Data URLs of the pictures before the prompt.
    """

    prompt: str
    token_ids: tuple[int, ...] | None
    output_len: int
    images: tuple[str, ...] = ()

    @property
    def prompt_len(self) -> int | None:
        """Number of prompt tokens; None without a tokenizer, or with pictures: only the server knows their tokens."""
        return None if self.token_ids is None or self.images else len(self.token_ids)


class BenchmarkTokenizer:
    """A model's tokenizer, loaded without torch and without the model's weights.

    Args:
        name: Model folder, GGUF file, hub name, or `demo`.

    Raises:
        ModelError, ConfigError: The model or its tokenizer.json is missing.
    """

    def __init__(self, name: str) -> None:
        from tokenizers import Tokenizer

        from mvllm.extension_api.cli import find_model

        file = find_model(name, with_weights=False) / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{file} is missing. Name the tokenizer with --tokenizer.")
        self._tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.no_truncation()
        self._special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        self._ordinary: list[int] | None = None

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, without special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def random_ids(self, count: int, random: np.random.Generator) -> list[int]:
        """Random ids of tokens that are words or parts of words."""
        if self._ordinary is None:
            self._ordinary = self._find_ordinary(random)
        return [self._ordinary[i] for i in random.integers(0, len(self._ordinary), count)]

    def _find_ordinary(self, random: np.random.Generator) -> list[int]:
        """Ids of tokens whose text encodes to the same token; preferably word beginnings, which never merge."""
        size = self._tokenizer.get_vocab_size()
        drawn = random.permutation(size)[:_CANDIDATES].tolist() if size > _CANDIDATES else range(size)
        texts = {i: self.decode([i]) for i in drawn if i not in self._special}
        words = [i for i, text in texts.items() if text[:1] == " " and text[1:].isalpha() and self.encode(text) == [i]]
        if len(words) >= 16:
            return words
        plain = [i for i, text in texts.items() if text.strip() and self.encode(text) == [i]]
        return plain or [i for i in drawn if i not in self._special]


def text_of_length(tokenizer: BenchmarkTokenizer, length: int, random: np.random.Generator, prefix: str = "") -> str:
    """`prefix` and random words of `length` tokens, or nearly so many if the tokenizer allows no exact length.

    Decoding and encoding may change the number of tokens, so the text is cut or extended until its encoding has the
    length.
    """
    skip = len(tokenizer.encode(prefix))
    ids = tokenizer.random_ids(length, random)
    text = ""
    for _ in range(_ROUNDS):
        text = tokenizer.decode(ids)
        found = tokenizer.encode(prefix + text)[skip:]
        if len(found) == length:
            break
        missing = max(length - len(found), 0)
        ids = found[:length] + (tokenizer.random_ids(missing, random) if missing else [])
    return prefix + text


def sample_requests(
    dataset: str,
    count: int,
    *,
    tokenizer: BenchmarkTokenizer | None,
    seed: int,
    path: Path | None = None,
    input_len: int | None = None,
    output_len: int | None = None,
    range_ratio: float = 0.0,
    prefix_len: int | None = None,
    num_prefixes: int = 10,
    num_images: int = 1,
    image_size: str = "256x256",
) -> list[SampleRequest]:
    """The requests of a benchmark.

    Args:
        dataset: One of DATASETS.
        count: Number of requests.
        tokenizer: Required by `random`, `random-mm` and `prefix_repetition`.
        seed: Equal seeds give equal requests.
        path: The file of `sharegpt`.
        input_len: Tokens of each prompt after the shared prefix.
        output_len: Output tokens to request; by default 128, or the length of the answer in the file.
        range_ratio: In [0, 1): lengths are uniform in length * (1 ± range_ratio).
        prefix_len: Tokens of the shared prefix.
        num_prefixes: Number of different prefixes, for `prefix_repetition`.
        num_images, image_size: Pictures of each request, and their size such as `640x480`, for `random-mm`.

    Raises:
        ConfigError: An argument is invalid or missing, or the file cannot be read.
    """
    import numpy as np

    if count < 1:
        raise ConfigError(f"The number of prompts is {count}; it must be at least 1.")
    if not 0 <= range_ratio < 1:
        raise ConfigError(f"The range ratio is {range_ratio}; it must be at least 0 and less than 1.")
    for name, length in (("input", input_len), ("output", output_len)):
        if length is not None and length < 1:
            raise ConfigError(f"The {name} length is {length}; it must be at least 1.")
    random = np.random.default_rng(seed)
    if dataset == "builtin":
        return _builtin(count, tokenizer, random, output_len)
    if dataset == "sharegpt":
        return _sharegpt(count, tokenizer, random, path, output_len)
    if tokenizer is None:
        raise ConfigError(f"The dataset {dataset!r} needs a tokenizer. Name one with --tokenizer.")
    num_prefixes = num_prefixes if dataset == "prefix_repetition" else 1
    if num_prefixes < 1:
        raise ConfigError(f"The number of prefixes is {num_prefixes}; it must be at least 1.")
    if prefix_len is None:
        prefix_len = DEFAULT_PREFIX_LEN if dataset == "prefix_repetition" else 0
    if prefix_len < 0:
        raise ConfigError(f"The prefix length is {prefix_len}; it must be at least 0.")
    prefixes = [text_of_length(tokenizer, prefix_len, random) if prefix_len else "" for _ in range(num_prefixes)]
    inputs = _lengths(input_len or DEFAULT_INPUT_LEN, range_ratio, count, random)
    outputs = _lengths(output_len or DEFAULT_OUTPUT_LEN, range_ratio, count, random)
    samples = []
    for i in range(count):
        text = text_of_length(tokenizer, inputs[i], random, prefixes[i % num_prefixes])
        samples.append(_sample(text, tokenizer, outputs[i]))
    return _with_images(samples, num_images, image_size, random) if dataset == WITH_IMAGES else samples


def _with_images(
    samples: Sequence[SampleRequest], num_images: int, size: str, random: np.random.Generator
) -> list[SampleRequest]:
    from mvllm_bench.images import parse_size, random_image_url

    if num_images < 1:
        raise ConfigError(f"The number of pictures is {num_images}; it must be at least 1.")
    pixels = parse_size(size)
    return [
        replace(sample, images=tuple(random_image_url(pixels, random) for _ in range(num_images))) for sample in samples
    ]


def _lengths(length: int, ratio: float, count: int, random: np.random.Generator) -> list[int]:
    low, high = max(1, int(length * (1 - ratio))), int(length * (1 + ratio))
    lengths: list[int] = random.integers(low, high, count, endpoint=True).tolist()
    return lengths


def _sample(text: str, tokenizer: BenchmarkTokenizer | None, output_len: int) -> SampleRequest:
    return SampleRequest(text, None if tokenizer is None else tuple(tokenizer.encode(text)), output_len)


def _builtin(
    count: int, tokenizer: BenchmarkTokenizer | None, random: np.random.Generator, output_len: int | None
) -> list[SampleRequest]:
    order = random.permutation(len(BUILTIN_PROMPTS)).tolist()
    texts = [BUILTIN_PROMPTS[order[i % len(order)]] for i in range(count)]
    return [_sample(text, tokenizer, output_len or DEFAULT_OUTPUT_LEN) for text in texts]


def _sharegpt(
    count: int,
    tokenizer: BenchmarkTokenizer | None,
    random: np.random.Generator,
    path: Path | None,
    output_len: int | None,
) -> list[SampleRequest]:
    """The first question of each conversation, in random order; repeated if the file has too few."""
    if path is None:
        raise ConfigError("The dataset 'sharegpt' is a file. Name it with --dataset-path.")
    turns = _first_turns(path)
    samples: list[SampleRequest] = []
    for index in random.permutation(len(turns)).tolist():
        if len(samples) == count:
            break
        question, answer = turns[index]
        if tokenizer is None:
            samples.append(SampleRequest(question, None, output_len or DEFAULT_OUTPUT_LEN))
            continue
        wanted = output_len or len(tokenizer.encode(answer))
        sample = _sample(question, tokenizer, wanted)
        num_input = len(sample.token_ids or ())
        if num_input < _SHORTEST or (output_len is None and wanted < _SHORTEST):
            continue
        if num_input > _LONGEST_PROMPT or num_input + wanted > _LONGEST_TOTAL:
            continue
        samples.append(sample)
    if not samples:
        raise ConfigError(
            f"No conversation of {path} can be used. Questions and answers need {_SHORTEST} tokens or more, questions "
            f"at most {_LONGEST_PROMPT}, both together at most {_LONGEST_TOTAL}."
        )
    return [samples[i % len(samples)] for i in range(count)]


def _first_turns(path: Path) -> list[tuple[str, str]]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"The dataset {path} cannot be read: {e.strerror}.") from e
    except ValueError as e:
        raise ConfigError(f"The dataset {path} is not JSON: {e}") from e
    if not isinstance(content, list):
        raise ConfigError(f"The dataset {path} must be a JSON list of conversations.")
    turns = []
    for entry in content:
        found = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
        texts = [turn.get("value") for turn in found if isinstance(turn, dict)] if isinstance(found, list) else []
        if len(texts) >= 2 and isinstance(texts[0], str) and isinstance(texts[1], str):
            turns.append((texts[0], texts[1]))
    return turns
