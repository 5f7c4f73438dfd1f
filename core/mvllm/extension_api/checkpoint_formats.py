"""For packages with a checkpoint format (entry points of `mvllm.checkpoint_formats`): `mvllm-gguf` is one.

A format is a subclass of `CheckpointFormat`. Its tensors are described and read as `TensorEntry` and `TensorReader`
say. docs/how-to/extending.md shows the whole. `list_models` is for packages that look for models in folders.
"""

from __future__ import annotations

from mvllm.checkpoint_formats.interface import CheckpointFormat as CheckpointFormat
from mvllm.checkpoint_formats.interface import ModelFiles as ModelFiles
from mvllm.checkpoint_formats.registry import list_models as list_models
from mvllm.checkpoint_formats.registry import source_files as source_files
from mvllm.checkpoint_formats.tensor_entry import TensorEntry as TensorEntry
from mvllm.checkpoint_formats.tensor_entry import TensorReader as TensorReader
from mvllm.checkpoint_formats.tensor_entry import packed_name as packed_name
from mvllm.config.hf_config import read_json_object as read_json_object
from mvllm.errors import plain_reason as plain_reason
from mvllm.models.checkpoint import read_checkpoint as read_checkpoint

__all__ = [
    "CheckpointFormat",
    "ModelFiles",
    "TensorEntry",
    "TensorReader",
    "list_models",
    "packed_name",
    "plain_reason",
    "read_checkpoint",
    "read_json_object",
    "source_files",
]
