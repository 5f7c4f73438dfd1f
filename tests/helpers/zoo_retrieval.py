"""Tiny random checkpoints of ColQwen2, made with transformers, and transformers' vectors of images and queries."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import ColQwen2Config, ColQwen2ForRetrieval, ColQwen2Processor

from tests.helpers.multimodal_zoo import draw_weights, make_tokenizer, save_processor
from tests.helpers.zoo_grids import GRIDS, QWEN_TOKENS

IMAGE_PROMPT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>"
"""The prompt of an image, as docs/how-to/embeddings.md has it."""
PADDING = "</s>"
"""The tokenizer's padding token, which is <|endoftext|> in published checkpoints."""


@dataclass(frozen=True)
class RetrievalEntry:
    """One checkpoint.

    Attributes:
        vlm: Makes the config of the model below the projection.
        embedding_dim: Components of a vector.
        rename: Changes the names of the saved tensors, as older checkpoints have them.
    """

    vlm: Callable[[], Any]
    embedding_dim: int
    rename: Callable[[str], str] = str


def _older_name(name: str) -> str:
    for theirs in ("vlm.model.", "vlm."):
        name = name.replace(f"{theirs}language_model.", "vlm.model.").replace(f"{theirs}visual.", "vlm.visual.")
    return name


RETRIEVAL: dict[str, RetrievalEntry] = {
    "colqwen2": RetrievalEntry(GRIDS["qwen2_vl"].config, 24),
    "colqwen2-older": RetrievalEntry(GRIDS["qwen2_vl-tied"].config, 128, _older_name),
}


@dataclass
class RetrievalOracle:
    """A checkpoint, and transformers' model and processor.

    Attributes:
        folder: The checkpoint.
        model: transformers' model: eager attention, float32.
        processor: transformers' processor.
    """

    folder: Path
    model: Any
    processor: Any

    def inputs(self, content: Image.Image | str) -> dict[str, Any]:
        """The processor's result for an image or a query."""
        processor = self.processor
        return dict(
            processor.process_queries([content]) if isinstance(content, str) else processor.process_images([content])
        )

    @torch.inference_mode()
    def vectors(self, content: Image.Image | str, **settings: Any) -> np.ndarray[Any, Any]:
        """float32 [tokens, embedding_dim]."""
        found: np.ndarray[Any, Any] = self.model(**self.inputs(content), **settings).embeddings[0].numpy()
        return found

    def scores(self, query: str, images: list[Image.Image]) -> list[float]:
        """Late interaction scores."""
        one, *others = (torch.tensor(self.vectors(each)) for each in (query, *images))
        found: list[float] = self.processor.score_retrieval([one], others)[0].tolist()
        return found


@functools.cache
def retrieval_oracle(name: str) -> RetrievalOracle:
    """The oracle of an entry; cached for the life of the process."""
    entry = RETRIEVAL[name]
    folder = Path(tempfile.mkdtemp(prefix="mvllm-retrieval-")) / name
    config = ColQwen2Config(vlm_config=entry.vlm(), embedding_dim=entry.embedding_dim)
    config._attn_implementation = "eager"
    model = ColQwen2ForRetrieval(config).eval()
    draw_weights(model)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({entry.rename(key): tensor for key, tensor in load_file(file).items()}, file, {"format": "pt"})
    tokenizer = make_tokenizer(QWEN_TOKENS)
    images = GRIDS["qwen2_vl"].processor(tokenizer).image_processor
    processor = ColQwen2Processor(images, tokenizer)
    save_processor(processor, folder)
    return RetrievalOracle(folder, model, processor)


def prompt_of(content: Image.Image | str) -> Any:
    """The prompt of an image or a query, as users write it."""
    if isinstance(content, str):
        return f"Query: {content}{PADDING * 10}\n"
    return {"prompt": IMAGE_PROMPT, "multi_modal_data": {"image": content}}
