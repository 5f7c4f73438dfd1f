"""CheckpointFormat: opens a model that is stored in files of another kind as a Hugging Face model folder.

    x.gguf ──model_folder──> folder: config.json, generation_config.json, tokenizer files    read as of every model
                             └ gguf_files.json: names x.gguf
                                    └──read_tensors──> TensorEntry, by Hugging Face name ──open_reader──> values

The front end translates the configuration and the tokenizer once, into a derived model folder. Weights are not copied:
workers read them from the files that the folder names. So a format answers which files are models (`is_model_file`,
`list_models`, `choose`), which folder a file becomes (`model_folder`, `known_files`), which tensors it has
(`read_tensors`), and how their bytes are read (`TensorEntry.open_reader`).

ModelError is a ValueError: code that turns the ValueErrors of a parser into a ModelError raises its own ones outside.

Core's own format is the Hugging Face folder with safetensors weights (`mvllm.models.checkpoint`). Its tensors are
`TensorEntry`s as well, and everything after them is common to all formats.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mvllm.checkpoint_formats.tensor_entry import TensorEntry


@dataclass(frozen=True)
class ModelFiles:
    """One model among the files of a folder or a repository.

    Attributes:
        stem: The path of its file without suffix and part number, for instance `name-Q8_0`.
        files: Paths of its files with `/`, in the order of their numbers; one if it is not split.
        quantization: The quantization in its name, which users may ask for (`folder:Q8_0`), else the stem.
    """

    stem: str
    files: tuple[str, ...]
    quantization: str


class CheckpointFormat(ABC):
    """One format. Created without arguments whenever it is needed, so it keeps no state. Its module needs no torch.

    The name of its entry point is its name: files `*.NAME` in any case are its files, `load_format` may be NAME, and
    each folder of `model_folder` has a file NAME_files.json.
    """

    @abstractmethod
    def is_model_file(self, path: Path) -> bool:
        """Whether a file without the format's suffix is of this format, by its first bytes.

        Args:
            path: An existing regular file.

        Raises:
            OSError: It cannot be read.
        """

    @abstractmethod
    def list_models(self, names: Iterable[str]) -> list[ModelFiles]:
        """The models among the files of a folder or a repository, sorted by name.

        Files with the format's suffix that are no language models (projectors of images, for instance) are left out.

        Args:
            names: Relative paths of all files, with `/`.
        """

    @abstractmethod
    def choose(self, models: Sequence[ModelFiles], quantization: str | None, where: str, how: str) -> ModelFiles:
        """Chooses one of several models.

        Args:
            models: From `list_models`; not empty.
            quantization: The requested quantization; None for the default.
            where: The searched folder or repository, for messages.
            how: Example of how to request a quantization, for messages; `{}` is replaced by it.

        Raises:
            ModelError: There is no such model, there are several, or one of its files is missing; lists the models.
        """

    @abstractmethod
    def model_folder(self, path: Path, *, with_tokenizer: bool = True) -> Path:
        """The derived model folder of a file, written if it does not exist.

        It has config.json, generation_config.json, the files of the tokenizer (tokenizer.json is complete: nothing is
        added to it), and NAME_files.json: `{"files": [{"path": ...}, ...]}` with the absolute paths of all files that
        hold the weights. Matrices that stay in blocks are listed in the `quantization_config` of config.json
        (`BlockQuantization`), whose `quant_method` is NAME. Several processes may call this at the same time.

        Where the folders are, and when they are removed, is the format's choice; `$MVLLM_CACHE_DIR/NAME`, by default
        `~/.cache/mvllm/NAME`, is that of GGUF.

        Args:
            path: A file of this format, as the user has named it.
            with_tokenizer: Whether to derive the tokenizer. If not, the model's tokenizer may be unsupported.

        Raises:
            ModelError: A file is missing or damaged, the model or its tokenizer is not supported, or no folder can be
                written.
        """

    @abstractmethod
    def known_files(self) -> list[list[Path]]:
        """The files of each model for which a derived folder is kept, for `mvllm list`. Files may be gone since."""

    @abstractmethod
    def read_tensors(
        self, folder: Path, most_tensors: int, packed: Callable[[str], bool] | None
    ) -> dict[str, TensorEntry]:
        """Every tensor of the checkpoint, by its Hugging Face name. Reads headers only.

        Args:
            folder: A derived model folder.
            most_tensors: Maximum number of tensors, including each expert's matrices.
            packed: Returns whether the weight of a name that is stored in blocks is also provided as it is stored:
                uint8 [..., rows, bytes per row], with the row order of the weight, under the name `packed_name`. None
                is no weight. Every weight is provided as floats.

        Returns:
            Entries of a class of the format, whose `open_reader` reads them. Called on every worker; each reads the
            parts that it holds, file by file, in the order of `start`.

        Raises:
            ModelError: A file is missing, damaged, or has changed since the folder was written; its architecture is not
                supported; or there are too many tensors.
        """
