"""OpProvider: a platform's implementation of one operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mvllm.contract import Phase, phase


@phase(Phase.WORKER)
@dataclass(frozen=True)
class OpCase:
    """Operation, dtype and sizes for which an implementation is selected, once, at model load.

    Attributes:
        op: Name of the operation.
        dtype: Compute dtype by name.
        facts: Further facts by name, as the operation's schema lists them (for instance `hidden_size`).
        batch_invariant: The engine was started with `batch_invariant`, so only providers with
            `OpProvider.batch_invariant` are asked, and `supports` must not decline a case because another provider is
            faster. Since contract 1.1.
    """

    op: str
    dtype: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    batch_invariant: bool = False


@phase(Phase.WORKER)
@dataclass(frozen=True)
class OpProvider:
    """A platform's implementation of one operation.

    `function` has the same parameters and result as the reference in `mvllm.ops`, works without host
    synchronisation, and does not change its inputs unless the schema says so.

    Attributes:
        op: Name of the operation it replaces.
        name: Name of the provider, for `mvllm ops`.
        function: The implementation.
        supports: Returns the reasons why a case is not supported; empty when it is.
        priority: The provider with the highest priority that supports a case is selected.
        prepare: For operations with a weight: converts the loaded weight to the form that `function` takes (for
            instance packed), once, after loading. Its memory may be reused, since the original is dropped; the
            exception is `linear` without `lookup`, where the weight of a tied head remains the token embedding. Takes
            and returns a tuple where there are several weights (`moe`). None keeps the weight as it is.
        lookup: For `linear` and `block_quantized_linear` with `prepare`: the operation `embedding` on the prepared
            weight, with the same bits as the reference on the original weight, dequantized and rounded to the compute
            dtype. A tied head's weight is then stored only in the prepared form.
        rounds_inputs: For operations with weights of quantized blocks: inputs of 16 bits are rounded to int8 if the
            facts contain `int8_activations`. False if the provider multiplies unrounded inputs instead; its results are
            then those of the same weights without `int8_activations`.
        batch_invariant: Each row of the result has the same bits whatever the number and contents of the other rows,
            its place among them, and the number of threads; with states also however a request's tokens are cut into
            steps. Since contract 1.1.
    """

    op: str
    name: str
    function: Callable[..., Any]
    supports: Callable[[OpCase], list[str]] = lambda case: []
    priority: int = 0
    prepare: Callable[[Any], Any] | None = None
    lookup: Callable[..., Any] | None = None
    rounds_inputs: bool = True
    batch_invariant: bool = False
