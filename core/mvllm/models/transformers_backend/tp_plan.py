"""How ranks share transformers' modules: its tensor parallel plan, in the terms of our layers.

colwise, colwise_gather_output     ColumnParallelLinear, and its bands gathered
rowwise, rowwise_split_input       RowParallelLinear, and its band of the input cut out first
replicate and its like             every rank has it whole
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum

from mvllm.errors import ConfigError


class Cut(Enum):
    """How one module is shared."""

    WHOLE = "whole"
    OUTPUTS = "outputs"
    COLWISE_GATHERED = "outputs, gathered"
    INPUTS = "inputs"
    ROWWISE_SPLIT_INPUT = "inputs, split"


_STYLES = {
    "colwise": Cut.OUTPUTS,
    "colwise_gather_output": Cut.COLWISE_GATHERED,
    "colwise_rep": Cut.COLWISE_GATHERED,
    "rowwise": Cut.INPUTS,
    "rowwise_split_input": Cut.ROWWISE_SPLIT_INPUT,
    "rowwise_rep": Cut.ROWWISE_SPLIT_INPUT,
    "replicate": Cut.WHOLE,
    "replicated_with_grad_allreduce": Cut.WHOLE,
    "mla_kv_a_proj": Cut.WHOLE,
    "local_params": Cut.WHOLE,
    "embedding_rowwise": Cut.WHOLE,  # embeddings are cut by our own layers, or not at all
}


class TPPlan:
    """Cuts by the names of modules and parameters.

    Args:
        styles: transformers' plan; `*` stands for a number in a name.
        num_ranks: How many share the model. One shares nothing.
        model: For messages.

    Raises:
        ConfigError: Several ranks are to share a model that has no plan, or one with parts that cannot be shared here.
    """

    def __init__(self, styles: Mapping[str, str], num_ranks: int, model: str) -> None:
        self._styles = dict(styles) if num_ranks > 1 else {}
        if num_ranks == 1:
            return
        asked = f"{model} runs through transformers, and tensor_parallel_size is {num_ranks}, but"
        remedy = "Use tensor_parallel_size=1, with data_parallel_size for more devices."
        if not any(_STYLES.get(style, Cut.WHOLE) is not Cut.WHOLE for style in self._styles.values()):
            raise ConfigError(f"{asked} transformers has no tensor parallel plan for this model. {remedy}")
        unknown = sorted({style for style in self._styles.values() if style not in _STYLES})
        if unknown:
            raise ConfigError(f"{asked} its plan has parts that cannot be shared here ({', '.join(unknown)}). {remedy}")

    def of(self, name: str) -> Cut:
        """How a module or parameter is shared."""
        return _STYLES[self._styles.get(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), "replicate")]
