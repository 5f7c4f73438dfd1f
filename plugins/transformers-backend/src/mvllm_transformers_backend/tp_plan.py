"""transformers' tensor-parallel plan, mapped to core's layers.

colwise, colwise_gather_output     ColumnParallelLinear, without and with a gather of the outputs
rowwise, rowwise_split_input       RowParallelLinear, with sharded and with whole input
replicate and similar              replicated
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum

from mvllm.extension_api import ConfigError


class ParallelStyle(Enum):
    """Parallel style of one module."""

    REPLICATED = "whole"
    COLWISE = "outputs"
    COLWISE_GATHERED = "outputs, gathered"
    ROWWISE = "inputs"
    ROWWISE_SPLIT_INPUT = "inputs, split"


_STYLES = {
    "colwise": ParallelStyle.COLWISE,
    "colwise_gather_output": ParallelStyle.COLWISE_GATHERED,
    "colwise_rep": ParallelStyle.COLWISE_GATHERED,
    "rowwise": ParallelStyle.ROWWISE,
    "rowwise_split_input": ParallelStyle.ROWWISE_SPLIT_INPUT,
    "rowwise_rep": ParallelStyle.ROWWISE_SPLIT_INPUT,
    "replicate": ParallelStyle.REPLICATED,
    "replicated_with_grad_allreduce": ParallelStyle.REPLICATED,
    "mla_kv_a_proj": ParallelStyle.REPLICATED,
    "local_params": ParallelStyle.REPLICATED,
    "embedding_rowwise": ParallelStyle.REPLICATED,  # core's own layers shard embeddings, or they stay whole
}


class TPPlan:
    """Parallel styles by the names of modules and parameters.

    Args:
        styles: transformers' plan; `*` matches a number in a name.
        num_ranks: Tensor-parallel size; with 1 everything is replicated.
        model: Name of the model, for messages.

    Raises:
        ConfigError: With several ranks, the model has no plan or one with unsupported styles.
    """

    def __init__(self, styles: Mapping[str, str], num_ranks: int, model: str) -> None:
        self._styles = dict(styles) if num_ranks > 1 else {}
        if num_ranks == 1:
            return
        asked = f"{model} runs through transformers, and tensor_parallel_size is {num_ranks}, but"
        remedy = "Use tensor_parallel_size=1, with data_parallel_size for more devices."
        if not any(
            _STYLES.get(style, ParallelStyle.REPLICATED) is not ParallelStyle.REPLICATED
            for style in self._styles.values()
        ):
            raise ConfigError(f"{asked} transformers has no tensor parallel plan for this model. {remedy}")
        unknown = sorted({style for style in self._styles.values() if style not in _STYLES})
        if unknown:
            raise ConfigError(f"{asked} its plan has parts that cannot be shared here ({', '.join(unknown)}). {remedy}")

    def style_of(self, name: str) -> ParallelStyle:
        """The parallel style of a module or parameter."""
        return _STYLES[self._styles.get(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), "replicate")]
