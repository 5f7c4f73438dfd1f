"""Loads a LoRA adapter's matrices for the layers of one rank."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

import torch

from mvllm.checkpoint_formats.tensor_entry import TensorEntry
from mvllm.errors import ModelError
from mvllm.layers.lora import LoRALayerWeights
from mvllm.models.causal_lm import CausalLM
from mvllm.models.peft_adapter import LoRAModule, PeftAdapter
from mvllm.models.safetensors_file import SafetensorsReader

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_lora_weights(
    adapter: PeftAdapter, model: CausalLM, shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype
) -> dict[str, LoRALayerWeights]:
    """The adapter's matrices for the layers of this rank, by checkpoint module; each unsharded, on the host.

    Shapes are compared with the layers before data is read, so that no file makes this rank allocate more memory than
    the layers need.

    Args:
        adapter: Its description.
        model: The model on this rank.
        shapes: (out_features, in_features) of the matrices of all its layers that support LoRA, by module.
        dtype: Compute dtype.

    Raises:
        ModelError: It is for another model, incomplete, damaged, or not finite in the compute dtype.
    """
    ours: dict[str, LoRAModule] = {}
    for name, module in adapter.modules.items():
        known = _model_module_name(model.model_name(name), shapes)
        if known is None:
            if not _is_on_another_stage(model.model_name(name), model, shapes):
                raise ModelError(_unknown(name, adapter, shapes))
            continue
        if module.shape != shapes[known]:
            raise ModelError(
                f"{adapter.path}: the adapter of {name[:200]!r} is for a matrix of shape {list(module.shape)}, but the "
                f"model's has {list(shapes[known])}. It belongs to another model."
            )
        ours[known] = module
    missing = [
        name for name in shapes if name not in ours and _is_target(_checkpoint_name(name, model), adapter.targets)
    ]
    if missing:
        raise ModelError(
            f"{adapter.path} is incomplete: it has no matrices for {missing[0]!r}, which target_modules in its "
            f"configuration lists ({len(missing)} missing in all). Download or copy it again."
        )
    with SafetensorsReader(adapter.path) as reader:
        return {name: _read(reader, module, dtype) for name, module in ours.items()}


def _read(reader: SafetensorsReader, module: LoRAModule, dtype: torch.dtype) -> LoRALayerWeights:
    down = _tensor(reader, module.down).to(dtype)
    up = (_tensor(reader, module.up).double() * module.scale).to(dtype)
    for entry, tensor in ((module.down, down), (module.up, up)):
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(
                f"{entry.file}: {entry.name[:200]!r} has values that are no finite numbers in {dtype}: NaN, infinite "
                "or too large."
            )
    return LoRALayerWeights(down, up)


def _tensor(reader: SafetensorsReader, entry: TensorEntry) -> torch.Tensor:
    tensor = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
    reader.read_into(tensor.view(-1).view(torch.uint8).numpy().data, entry, 0)
    return tensor


def _model_module_name(name: str, shapes: Mapping[str, tuple[int, int]]) -> str | None:
    """The model's name of a module; adapters of the model without head omit its first component."""
    if name in shapes:
        return name
    first_components = {known.split(".", 1)[0] for known in shapes}
    return next((full for first in sorted(first_components) if (full := f"{first}.{name}") in shapes), None)


def _is_on_another_stage(name: str, model: CausalLM, shapes: Iterable[str]) -> bool:
    """Whether a module belongs to another pipeline stage, which checks it."""
    if model.stage.is_first and model.stage.is_last:
        return False
    firsts = {known.split(".", 1)[0] + "." for known in shapes}
    return name != model.head_name and any(model.ignores(f"{first}{name}.weight") for first in ("", *firsts))


def _checkpoint_name(name: str, model: CausalLM) -> str:
    """The name to which `target_modules` refers: a class may have another name for a module than its checkpoints."""
    return next(iter(model.checkpoint_names(name)), name)


def _is_target(name: str, targets: Iterable[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _unknown(name: str, adapter: PeftAdapter, shapes: Mapping[str, tuple[int, int]]) -> str:
    nearest = difflib.get_close_matches(name[:200], shapes, n=1, cutoff=0.6)
    hint = f" The nearest that it has is {nearest[0]!r}." if nearest else ""
    return (
        f"{adapter.path} adapts {name[:200]!r}, which is not a linear layer of this model that supports LoRA "
        f"(embeddings, heads, fused experts and encoders do not).{hint}"
    )
