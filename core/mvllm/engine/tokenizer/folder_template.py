"""The chat template in a tokenizer's folder, rendered without creating the tokenizer of transformers.

Importing transformers takes a second, and its tokenizer reads `tokenizer.json` a second time: more than all else up to
the first token of a small model. Rendering needs the template and the special tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mvllm.config.hf_config import read_json_object

_TEMPLATE_FILE = "chat_template.jinja"
_PROCESSOR_FILE = "chat_template.json"
"""Older processors write their template here, as the key `chat_template`. It is used before that of the tokenizer."""
_MORE_TEMPLATES = "additional_chat_templates"


class FolderTemplate:
    """Has the attributes of a transformers tokenizer that rendering uses.

    Args:
        chat_template: The template; None if the folder has none.
        special_tokens: Special tokens by the names that templates use.
        source: The file of the template, for messages.
    """

    def __init__(self, chat_template: str | None, special_tokens: Mapping[str, str], source: str = "") -> None:
        self.chat_template, self.source = chat_template, source
        self.special_tokens_map = dict(special_tokens)

    def get_chat_template(self, chat_template: str | None = None, tools: Sequence[Any] | None = None) -> str | None:
        """The template that `apply_chat_template` renders: the given one, or that of the folder."""
        return self.chat_template if chat_template is None else chat_template

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, chat_template: str | None, tokenize: bool, **settings: Any
    ) -> str:
        """As the method of transformers' tokenizers with `tokenize=False`: keys that are None are left out."""
        from mvllm.engine.tokenizer.jinja_template import OtherTypeError, render_template

        assert not tokenize, "renders text only"
        chat = [{key: value for key, value in message.items() if value is not None} for message in conversation]
        template = self.get_chat_template(chat_template)
        assert template is not None, "the caller checks that there is a template"
        variables = {**self.special_tokens_map, **settings}
        if not variables.pop("continue_final_message", False):
            with contextlib.suppress(OtherTypeError):
                return render_template(template, chat, variables)
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, _ = render_jinja_template(
            conversations=[chat], chat_template=template, **{**self.special_tokens_map, **settings}
        )
        return str(texts[0])


def read_folder_template(
    folder: Path, settings: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> FolderTemplate | None:
    """The template of a folder; None if there are several, or it cannot be read: transformers handles these.

    Args:
        folder: A tokenizer's folder.
        settings: Contents of its `tokenizer_config.json`.
        special_tokens: As in FolderTemplate.
    """
    if (folder / _MORE_TEMPLATES).exists():
        return None
    template, file = settings.get("chat_template"), "tokenizer_config.json"
    try:
        if (of_processor := read_processor_template(folder)) is not None:
            template, file = of_processor, _PROCESSOR_FILE
        if (folder / _TEMPLATE_FILE).exists():
            template, file = (folder / _TEMPLATE_FILE).read_text(encoding="utf-8"), _TEMPLATE_FILE
    except (OSError, ValueError):  # ModelError is a ValueError
        return None
    return FolderTemplate(template, special_tokens, str(folder / file)) if isinstance(template, str | None) else None


def read_processor_template(folder: Path) -> str | None:
    """The template that an older processor has written; None if a newer file has one.

    Raises:
        ModelError: The file is not a JSON object.
    """
    file = folder / _PROCESSOR_FILE
    if not file.exists() or (folder / _TEMPLATE_FILE).exists():
        return None
    template = read_json_object(file).get("chat_template")
    return template if isinstance(template, str) else None
