"""Image generation: `ImageParams`, and what `LLM.generate_images` returns.

The package mvllm-image-generation has it (docs/how-to/install.md#parts).
"""

from typing import Any

from mvllm.platform.module_aliases import alias_module

_attribute = alias_module(__name__, part="image-generation")


def __getattr__(name: str) -> Any:
    return _attribute(name)
