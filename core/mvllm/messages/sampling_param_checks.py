"""Checks of the fields of SamplingParams that hold texts, token ids and dicts, and their limits.

Each check takes the field's name and a value that is not the default, and returns the value to keep.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from mvllm.errors import RequestError
from mvllm.messages.field_checks import (
    INT64_MAX,
    LARGEST_FLOAT,
    as_float,
    as_int,
    is_unicode,
    number,
    reject,
    token_ids,
)

MAX_STOP_STRINGS = 128
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
"""Stop conditions are checked after every token, so their number and length are limited."""

MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 1024
MAX_BAD_WORD_TOKENS = 1 << 15
"""Limits of `bad_words`: their number, the characters of each, and the tokens of all together."""

MAX_LOGIT_BIASES = 4096
MAX_LOGIT_BIAS = 100.0
MAX_ALLOWED_TOKEN_IDS = 1 << 20
MAX_FORCED_TOKEN_IDS = 1 << 16
MAX_EXTRA_ARGS_BYTES = 1 << 16
MAX_GUIDANCE_SCALE = 1000.0
MAX_NEGATIVE_PROMPT_CHARS = 1 << 22

MIN_TEMPERATURE = 0.01
"""The lowest temperature that samples; values between 0 and this are raised to it, as smaller divisors overflow."""


_non_negative = number(0.0, LARGEST_FLOAT)


def check_temperature(name: str, value: object) -> float:
    temperature: float = _non_negative(name, value)
    return max(temperature, MIN_TEMPERATURE) if temperature > 0.0 else 0.0


def check_guidance_scale(name: str, value: object) -> float | None:
    if value is None:
        return None
    scale = as_float(value)
    if scale is None or not 0.0 <= scale <= MAX_GUIDANCE_SCALE:
        return reject(name, value, f"a number from 0 to {MAX_GUIDANCE_SCALE:g}")
    return scale


def check_negative_prompt(name: str, value: object) -> str | list[int] | None:
    expected = f"a text of at most {MAX_NEGATIVE_PROMPT_CHARS} characters, or a list of token ids"
    if value is None:
        return None
    if isinstance(value, str):
        if not 0 < len(value) <= MAX_NEGATIVE_PROMPT_CHARS:
            return reject(name, value, expected)
        return value if is_unicode(value) else reject(name, value, "valid Unicode, without lone surrogates")
    if not isinstance(value, list | tuple) or not value:
        return reject(name, value, expected)
    return token_ids(name, value)


def check_token_space(name: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 64:
        return reject(name, value, "the name of a token space, such as 'text' or 'image'")
    return value


def check_functions(name: str, value: object) -> list[Any] | None:
    if not isinstance(value, list | tuple) or not all(map(callable, value)):
        return reject(
            name,
            value,
            "a list of functions of output token ids and logits; classes are named in the engine's setting "
            "logits_processors",
        )
    if any(isinstance(each, type) for each in value):
        return reject(name, value, "a list of functions; give classes to the engine's setting logits_processors")
    return list(value) or None


def check_stop(name: str, value: object) -> list[str] | None:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or len(texts) > MAX_STOP_STRINGS:
        return reject(name, value, f"a string or a list of at most {MAX_STOP_STRINGS} strings")
    for text in texts:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_STRING_LENGTH:
            reject(name, text, f"made of strings of 1 to {MAX_STOP_STRING_LENGTH} characters")
        if not is_unicode(text):
            reject(name, text, "valid Unicode, without lone surrogates")
    return [str(text) for text in texts] or None


def check_stop_token_ids(name: str, value: object) -> list[int] | None:
    if not isinstance(value, list | tuple) or len(value) > MAX_STOP_TOKEN_IDS:
        return reject(name, value, f"a list of at most {MAX_STOP_TOKEN_IDS} token ids")
    return list(dict.fromkeys(token_ids(name, value))) or None


def check_logit_bias(name: str, value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or len(value) > MAX_LOGIT_BIASES:
        return reject(name, value, f"a dict of at most {MAX_LOGIT_BIASES} token ids and numbers")
    biases = {}
    for key, bias in value.items():
        number = as_float(bias)
        if number is None or not math.isfinite(number):
            return reject(name, bias, "made of token ids and finite numbers")
        # Keys of JSON objects are strings.
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12
        token_id = as_int(int(key) if is_digits else key)
        if token_id is None or not 0 <= token_id < 2**31:
            return reject(name, key, "made of token ids and finite numbers")
        biases[token_id] = min(max(number, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS)
    return biases or None


def check_forced_token_ids(name: str, value: object) -> dict[int, int] | None:
    if value is None:
        return None
    expected = f"a dict of at most {MAX_FORCED_TOKEN_IDS} positions in the output, from 0, and token ids"
    if not isinstance(value, Mapping) or len(value) > MAX_FORCED_TOKEN_IDS:
        return reject(name, value, expected)
    for each in (*value.keys(), *value.values()):
        found = as_int(each)
        if found is None or not 0 <= found < 2**31:
            return reject(name, each, expected)
    return {int(position): int(token_id) for position, token_id in value.items()} or None


def check_allowed_token_ids(name: str, value: object) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MAX_ALLOWED_TOKEN_IDS:
        return reject(name, value, f"a list of 1 to {MAX_ALLOWED_TOKEN_IDS} token ids")
    return sorted(set(token_ids(name, value)))


def check_bad_words(name: str, value: object) -> list[str] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) > MAX_BAD_WORDS:
        return reject(name, value, f"a list of at most {MAX_BAD_WORDS} strings")
    for text in value:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_BAD_WORD_LENGTH or not text.strip():
            reject(name, text, f"made of strings of 1 to {MAX_BAD_WORD_LENGTH} characters, not all of them spaces")
        if not is_unicode(text):
            reject(name, text, "valid Unicode, without lone surrogates")
    return [str(text) for text in value] or None


def check_bad_words_token_ids(name: str, value: object) -> list[list[int]] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) > 4 * MAX_BAD_WORDS:
        return reject(name, value, f"a list of at most {4 * MAX_BAD_WORDS} lists of token ids")
    left = MAX_BAD_WORD_TOKENS
    for word in value:
        if not isinstance(word, list | tuple) or not 0 < len(word) <= left:
            reject(name, word, f"made of lists of token ids, none empty, {MAX_BAD_WORD_TOKENS} ids in all at most")
        left -= len(word)
    return [token_ids(name, word) for word in value] or None


def check_truncate_prompt_tokens(name: str, value: object) -> int | None:
    number = None if value is None else as_int(value)
    if value is not None and (number is None or not (number == -1 or 1 <= number <= INT64_MAX)):
        return reject(name, value, "an integer >= 1, or -1 for as many tokens as the context holds")
    return number


def check_early_stopping(name: str, value: object) -> bool | str:
    if isinstance(value, bool) or (isinstance(value, str) and value == "never"):  # an array has no truth value
        return value
    return bool(reject(name, value, "True, False or 'never'"))


def check_extra_args(name: str, value: object) -> dict[str, Any] | None:
    if value is None:
        return None
    expected = f"a dict of JSON values with strings as keys, of at most {MAX_EXTRA_ARGS_BYTES} bytes"
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        return reject(name, value, expected)
    try:
        packed = msgspec.msgpack.encode(value)
        if len(packed) > MAX_EXTRA_ARGS_BYTES:
            return reject(name, value, expected)
        return msgspec.msgpack.decode(packed, type=dict[str, Any]) or None  # a copy, which the caller cannot change
    except RequestError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError):  # not JSON, or nested too deeply
        return reject(name, value, expected)
