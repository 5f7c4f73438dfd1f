"""The types of a prompt that `generate` and `encode` accept."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from mvllm.messages.multimodal import MultiModalItem


class ItemFields(TypedDict):
    """Images, audio and videos of a prompt. The prompt has a placeholder for each, in their order.

    Attributes:
        multi_modal_data: Contents by modality (`image`, `video`, `audio`): one or a list of them. A content is bytes, a
            URL, the name of a file, an image of Pillow, or an array of numpy.
        mm_processor_kwargs: Arguments of the model's processor, over those of the engine.
        multi_modal_uuids: By modality, names of the contents in place of their hashes.
    """

    multi_modal_data: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    multi_modal_uuids: NotRequired[dict[str, Any]]


class TextPrompt(ItemFields):
    """A prompt as text, to be tokenized by the engine's front end.

    Attributes:
        add_special_tokens: Whether the tokenizer adds its special tokens; a rendered chat template has them.
        cut_at: A text at which the prompt is cut. The pieces are tokenized one by one, so that no token, nor the
            placeholder of an item, reaches from one to the next.
    """

    prompt: str
    cache_salt: NotRequired[str]
    add_special_tokens: NotRequired[bool]
    cut_at: NotRequired[str]


class TokensPrompt(ItemFields):
    """A prompt as token ids. `prompt`, if given, is only echoed in the output."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings: a float tensor of torch or array of numpy [tokens, hidden_size]."""

    prompt_embeds: Any
    cache_salt: NotRequired[str]


class ExpandedPrompt(TypedDict):
    """A prompt that the engine has expanded: token ids with the positions of all items, and these. The engine's own."""

    prompt_token_ids: list[int]
    multi_modal_items: list[MultiModalItem]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt | ExpandedPrompt
