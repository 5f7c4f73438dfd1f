"""Token spaces: the tokens of a model that are not text, such as the codes of images.

All tokens share one range of ids. A space is a contiguous part of it:

    | text ................ | codes of the space "image" ........ |
    0                       first                       first + size

The ids of a space lie behind the vocabulary of text (Janus: an embedding and a head of their own), or within it (Emu3:
the model's embedding and head). Spaces are a property of the model's config, so that front end and scheduler know them
without the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mvllm.config.hf_config import HFConfig
from mvllm.contract import ANY, phase
from mvllm.errors import ModelError
from mvllm.messages.sampling_params import TEXT

_LARGEST_ID = 2**31 - 1


@phase(ANY)
@dataclass(frozen=True)
class TokenSpace:
    """One space of tokens beside text.

    Attributes:
        name: What requests call it (`SamplingParams.token_space`).
        first: Id of code 0. The id of code c is `first + c`.
        size: Number of codes.
        num_tokens: Tokens of one output, the default of `max_tokens`; None if the model has no such number.
        has_own_head: Whether `CausalLM.compute_space_logits` computes the logits. Otherwise they are columns of the
            text logits.
        begin_token_ids: Tokens at the end of a prompt that begin an output of this space. The unconditional prompt
            keeps them. Without them guided requests need a `negative_prompt`.
        pad_token_id: Replaces the other tokens in the unconditional prompt; None for models without such a convention,
            whose unconditional prompt is the first token and `begin_token_ids`.
    """

    name: str
    first: int
    size: int
    num_tokens: int | None = None
    has_own_head: bool = True
    begin_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def stop(self) -> int:
        """The id behind the last one."""
        return self.first + self.size

    def codes_of(self, token_ids: list[int]) -> list[int]:
        """The codes of those tokens that are of this space, such as not the forced ends of an image's rows."""
        first, stop = self.first, self.stop
        return [token_id - first for token_id in token_ids if first <= token_id < stop]


ReadSpaces = Callable[[HFConfig, int, HFConfig], dict[str, TokenSpace]]
"""Reads the spaces of a family from its config, the size of the text vocabulary, and `generation_config.json`."""


def token_spaces_of(
    hf_config: HFConfig, vocab_size: int, generation: HFConfig, read: ReadSpaces | None
) -> dict[str, TokenSpace]:
    """The spaces of a model, by name: those of its family, or those of the key `token_spaces` of its config.

    The key holds an object of names to the fields of TokenSpace. Models of plugins declare their spaces with it.

    Args:
        vocab_size: Size of the text vocabulary.
        generation: `generation_config.json`.
        read: Reads the spaces of the family; None for families without.

    Raises:
        ModelError: The key is invalid.
    """
    declared = hf_config.get("token_spaces")
    if declared is None:
        if read is None:
            return {}
        return check_token_spaces(read(hf_config, vocab_size, generation), vocab_size, hf_config.source)
    if not isinstance(declared, dict) or not all(isinstance(fields, dict) for fields in declared.values()):
        raise ModelError(
            f"{hf_config.source}: 'token_spaces' should be an object of names to objects with 'first' and 'size', "
            f"found {declared!r:.200}."
        )
    spaces = {name: _space_from(name, fields, hf_config.source) for name, fields in declared.items()}
    if read is not None:
        _check_family(spaces, read(hf_config, vocab_size, generation), hf_config.source)
    return check_token_spaces(spaces, vocab_size, hf_config.source)


def check_token_spaces(spaces: dict[str, TokenSpace], vocab_size: int, source: str) -> dict[str, TokenSpace]:
    """Returns `spaces`.

    Raises:
        ModelError: One has no ids, has the name of text, leaves a gap behind the vocabulary, or overlaps another; or a
            token of its prompts is not one of text.
    """
    stop = vocab_size
    for space in sorted(spaces.values(), key=lambda each: each.first):
        for token_id in (*space.begin_token_ids, *([] if space.pad_token_id is None else [space.pad_token_id])):
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise ModelError(
                    f"{source}: begin_token_ids and pad_token_id of the token space {space.name!r} should be token ids "
                    f"below {vocab_size}, found {token_id!r:.40}."
                )
        is_inside = space.stop <= vocab_size
        if space.name == TEXT or space.size < 1 or space.first < 0 or space.stop > _LARGEST_ID:
            raise ModelError(
                f"{source}: the token space {space.name!r} has the ids {space.first} to {space.stop - 1}. A space "
                f"needs a name other than {TEXT!r} and at least one id from 0 to {_LARGEST_ID - 1}."
            )
        if is_inside and not space.has_own_head:
            continue
        if space.first != stop or not space.has_own_head:
            raise ModelError(
                f"{source}: the token space {space.name!r} has the ids {space.first} to {space.stop - 1}. A space "
                f"with its own head must begin at {stop}, behind the vocabulary and the spaces before; one without "
                f"must lie within the vocabulary of {vocab_size} tokens."
            )
        stop = space.stop
    return spaces


def _check_family(declared: dict[str, TokenSpace], expected: dict[str, TokenSpace], source: str) -> None:
    """Checks that the declared spaces include those that the classes of the family have.

    Raises:
        ModelError: One is missing, or has other ids.
    """
    for name, space in expected.items():
        found = declared.get(name)
        if found is None or _place_of(found) != _place_of(space):
            raise ModelError(
                f"{source}: 'token_spaces' declares {sorted(declared)}, but a model of this family has the space "
                f"{name!r} with first={space.first}, size={space.size} and has_own_head={space.has_own_head}. Declare "
                "it so, or leave 'token_spaces' out."
            )


def _place_of(space: TokenSpace) -> tuple[int, int, bool]:
    return space.first, space.size, space.has_own_head


def _space_from(name: str, fields: dict[str, Any], source: str) -> TokenSpace:
    known = {
        "first": int,
        "size": int,
        "num_tokens": int,
        "has_own_head": bool,
        "begin_token_ids": list,
        "pad_token_id": int,
    }
    for key, value in fields.items():
        if key not in known or type(value) is not known[key]:
            raise ModelError(
                f"{source}: the token space {name!r} has {key}={value!r:.80}. Its fields are "
                + ", ".join(f"{each} ({kind.__name__})" for each, kind in known.items())
                + "."
            )
    if "first" not in fields or "size" not in fields:
        raise ModelError(f"{source}: the token space {name!r} needs 'first' and 'size', found {sorted(fields)}.")
    values = {**fields, "begin_token_ids": tuple(fields.get("begin_token_ids", ()))}
    return TokenSpace(name, **values)
