"""Multi-token-prediction (MTP) modules of a checkpoint: whether it has any, and whether they are used by default.

Architecture.mtp of the family's record   which class, which names, which key of config.json
config.json                               how many modules the checkpoint has
names of the checkpoint's tensors         whether it really has them: quantized copies often leave them out
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mvllm.checkpoint_formats.registry import is_derived_folder
from mvllm.config.checkpoint_head import tensor_names
from mvllm.config.families import core_architectures, find_architecture
from mvllm.config.model import ModelConfig
from mvllm.config.model_family import MTPHeads
from mvllm.config.model_implementations import runs_natively
from mvllm.errors import ConfigError, ModelError

MTP = "mtp"
_REMEDY = "Choose another method, or leave speculative_config out."


def mtp_heads(model: ModelConfig) -> tuple[MTPHeads, int]:
    """The record of a model's MTP modules, and their number.

    The names of tensors are compared where the checkpoint has safetensors files: configs of files of other formats are
    derived from their tensors.

    Raises:
        ConfigError: The architecture has no MTP modules, or the checkpoint has none.
        ModelError: The number in config.json is invalid.
    """
    found = find_architecture(model.architecture)
    mtp = None if found is None else found.mtp
    if mtp is None or not runs_natively(model.architecture, model.model_impl):
        raise ConfigError(
            f"speculative_config: the method {MTP!r} drafts with the multi-token-prediction modules of a checkpoint, "
            f"which are not supported for {model.architecture}"
            f"{'' if mtp is None else f' with model_impl={model.model_impl!r}'}. They are for "
            f"{', '.join(_architectures_with_heads())}. {_REMEDY}"
        )
    count = _number_of_modules(model, mtp)
    if count == 0:
        raise ConfigError(
            f"speculative_config: the method {MTP!r} drafts with the multi-token-prediction modules of a checkpoint, "
            f"but according to {model.hf_config.source} this checkpoint has none ({' or '.join(mtp.count_keys)}). "
            f"{_REMEDY}"
        )
    prefix, names = mtp.tensors.format(layer=model.num_layers), tensor_names(model.path)
    if names and not any(name.startswith(prefix) for name in names):
        raise ConfigError(
            f"speculative_config: the method {MTP!r} drafts with the multi-token-prediction modules of a checkpoint, "
            f"but {model.path} has no tensor whose name begins with {prefix!r}: this copy of the checkpoint leaves "
            f"them out. Load the original checkpoint. {_REMEDY}"
        )
    return mtp, count


def default_speculative_config(model: ModelConfig) -> Mapping[str, Any] | None:
    """The value of `speculative_config` where the setting is not given; None for no speculative decoding.

    A checkpoint that really has MTP modules is used with them, unless the platform or another setting excludes them:
    `mvllm.engine.core.default_drafts` decides that, because the platform is not known here.
    """
    try:
        mtp, _ = mtp_heads(model)
    except (ConfigError, ModelError):
        return None
    if names := tensor_names(model.path):
        # Copies that leave the module out may have kept some matrices of it.
        prefix = mtp.tensors.format(layer=model.num_layers)
        is_whole = any(name.startswith(prefix) and "norm" in name for name in names)
        return {"method": MTP} if is_whole else None
    # Other files: config.json was derived from their tensors, so a number that stands there is that of modules.
    is_certain = is_derived_folder(model.path) and any(model.hf_config.get(key) for key in mtp.count_keys)
    return {"method": MTP} if is_certain else None


def _number_of_modules(model: ModelConfig, mtp: MTPHeads) -> int:
    hf = model.hf_config
    key = next((key for key in mtp.count_keys if hf.get(key) is not None), None)
    if key is None:
        return mtp.default_count
    count = hf.get(key)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ModelError(f"{hf.source}: {key!r} should be a number of modules, found {count!r:.40}.")
    return count


def _architectures_with_heads() -> list[str]:
    found = {name: find_architecture(name) for name in core_architectures()}
    return [name for name, architecture in found.items() if architecture is not None and architecture.mtp is not None]
