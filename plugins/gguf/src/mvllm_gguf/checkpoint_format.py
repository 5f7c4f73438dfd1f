"""The checkpoint format `gguf`: what mvllm asks when it meets a GGUF file.

Choosing a file needs only its name, and finding a model folder that exists only a few calls of stat. So modules that
convert or read tensors are imported when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from mvllm.extension_api.checkpoint_formats import CheckpointFormat, ModelFiles, TensorEntry
from mvllm_gguf.file_choice import choose, list_models
from mvllm_gguf.header import MAGIC
from mvllm_gguf.model_folder import derived_files, model_folder, update_states


class GGUF(CheckpointFormat):
    """GGUF files, which hold weights, configuration and tokenizer of a model."""

    def is_model_file(self, path: Path) -> bool:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC

    def list_models(self, names: Iterable[str]) -> list[ModelFiles]:
        return list_models(names)

    def choose(self, models: Sequence[ModelFiles], quantization: str | None, where: str, how: str) -> ModelFiles:
        return choose(models, quantization, where, how)

    def model_folder(self, path: Path, *, with_tokenizer: bool = True) -> Path:
        return model_folder(path, with_tokenizer=with_tokenizer)

    def known_files(self) -> list[list[Path]]:
        return derived_files()

    def read_tensors(
        self, folder: Path, most_tensors: int, packed: Callable[[str], bool] | None
    ) -> dict[str, TensorEntry]:
        from mvllm_gguf.checkpoint import read_gguf_folder

        update_states(folder)
        return read_gguf_folder(folder, most_tensors, packed=packed)
