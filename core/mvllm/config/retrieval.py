"""Models for retrieval by late interaction, which give a vector for each token. Needs no torch.

Their config.json holds that of the model below the projection:

    {"architectures": ["ColQwen2ForRetrieval"], "embedding_dim": 128, "vlm_config": {"model_type": "qwen2_vl", ...}}
"""

from __future__ import annotations

from mvllm.config.families import find_architecture
from mvllm.config.hf_config import HFConfig

_INNER = "vlm_config"
_OUTER_ONLY = ("architectures", "transformers_version")


def with_inner_config(outer: HFConfig) -> HFConfig:
    """A config.json with the values of its `vlm_config` at the top level; others are returned as they are.

    Raises:
        ModelError: `vlm_config` is not an object.
    """
    names = outer.get("architectures")
    if _INNER not in outer or not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        return outer
    found = find_architecture(names[0])
    if found is None or not found.gives_token_vectors:
        return outer
    inner = {key: value for key, value in outer.require(_INNER, dict).items() if key not in _OUTER_ONLY}
    own = {key: value for key, value in outer.as_dict().items() if key not in (_INNER, "model_type")}
    return HFConfig({**inner, **own}, outer.source)
