"""What `/v1/models` says about the served model besides its names: its capabilities, its inputs, and example messages.

Examples are those of the model card, `README.md` in the model's folder, whose YAML header lists them under `widget` as
on the Hugging Face hub: `text`, or `messages` with one message of a user, and `src` with a picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mvllm.config.multimodal import MODALITIES
from mvllm.entrypoints.openai.common.serving_context import ServingContext

MODEL_CARD = "README.md"
_MAX_HEADER = 16 << 10  # characters
_MAX_DEPTH = 16  # of lists and mappings; YAML takes seconds for hundreds
_MAX_EXAMPLES = 8
_MAX_TEXT = 400
_MAX_PICTURE = 8 << 10


async def model_facts(context: ServingContext) -> dict[str, Any]:
    """Fields of the entries of `/v1/models`.

    Returns:
        `capabilities`: of `chat`, `completion`, `tools`, `reasoning` and `embedding`; `input_modalities`: `text` and
        what a prompt may have besides; `example_messages`: contents of messages, a text or a list of parts each.
    """
    return await context.tokenizer_pool.run(lambda: _facts(context))


def _facts(context: ServingContext) -> dict[str, Any]:
    config, renderer = context.engine.model_config, context.prompt_renderer
    has_template = config.kind.generates and bool(renderer.template_text())
    capabilities = {
        "chat": has_template,
        "completion": config.kind.generates,
        "tools": has_template and renderer.tool_parser is not None,
        "reasoning": has_template and renderer.reasoning_parser is not None,
        "embedding": config.kind.is_embedder,
    }
    modalities = context.modalities
    return {
        "capabilities": [name for name, has in capabilities.items() if has],
        "input_modalities": ["text", *(each for each in MODALITIES if each in modalities)],
        "example_messages": read_examples(config.path, with_pictures="image" in modalities) if has_template else [],
    }


def read_examples(folder: Path, *, with_pictures: bool) -> list[str | list[dict[str, Any]]]:
    """The example messages of a folder's model card; none where it has no card, or one that cannot be read.

    Args:
        with_pictures: Whether to return examples with a picture. Only pictures in the card itself (`data:` URLs) count.
    """
    import yaml

    try:
        with (folder / MODEL_CARD).open(encoding="utf-8") as file:
            text = file.read(_MAX_HEADER)
    except (OSError, ValueError):
        return []
    first, _, rest = text.partition("\n")
    header, end, _ = rest.partition("\n---")
    if first.rstrip() != "---" or not end:
        return []
    try:
        depth = 0
        for event in yaml.parse(header, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                return []
        fields = yaml.safe_load(header)
    except Exception:  # noqa: BLE001  (for a wrong tag, such as `!!bool maybe`, PyYAML raises KeyError and others)
        return []
    widgets = fields.get("widget") if isinstance(fields, Mapping) else None
    found = [_example(each) for each in widgets[:_MAX_EXAMPLES]] if isinstance(widgets, list) else []
    return [each for each in found if each is not None and (with_pictures or isinstance(each, str))]


def _example(widget: Any) -> str | list[dict[str, Any]] | None:
    """The content of one message; None if the entry has none that can be sent."""
    if not isinstance(widget, Mapping):
        return None
    text, messages, picture = widget.get("text"), widget.get("messages"), widget.get("src")
    if text is None and isinstance(messages, list) and len(messages) == 1 and isinstance(messages[0], Mapping):
        text = messages[0].get("content")
    if not isinstance(text, str) or not 0 < len(text) <= _MAX_TEXT:
        return None
    if picture is None:
        return text
    if not isinstance(picture, str) or not picture.startswith("data:image/") or len(picture) > _MAX_PICTURE:
        return None
    return [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": text}]
