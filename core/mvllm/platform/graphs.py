"""The interface for compilation and capture of whole steps; and an older one, which is deprecated."""

from __future__ import annotations

import functools
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from mvllm.contract import Phase, phase


@phase(Phase.WORKER)
class GraphBackend(ABC):
    """Records a step once and replays it.

    Deprecated until contract 2.0: nothing calls it. A platform that replays graphs does so in its CompileBackend.
    """

    @abstractmethod
    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Runs `step` while recording and returns a replay.

        The replay reads inputs from, and writes results to, the tensors that `step` used.
        """

    @abstractmethod
    def memory_bytes(self) -> int:
        """Device memory held by all captured graphs."""


@phase(Phase.WORKER)
class CompileBackend(ABC):
    """Compiles a function over tensors.

    Returned by `Platform.compiler`, where `Capabilities.compile` is set. Errors are raised as PlatformError.

    Core compiles one function per worker, the model's forward pass, after the KV cache is allocated and unless
    `enforce_eager` is set. Its arguments are positional: the step's tensors, or None for those that the model does not
    read, or, if `needs_warm_up` is false, does not read in this step; then the result of `build_metadata` of each of
    this platform's attention backends, and for models with sequence states that of `StateBackend.build_metadata` (since
    contract 1.1). A step of such a model that verifies draft tokens has more of them: two int32 tensors follow, and
    another result of `StateBackend.build_metadata` for each draft position. If tokens have LoRA adapters in a step
    whose `BatchLayout.capture` is set, one more tensor follows (since contract 1.1), int32 [T]: the slot of each
    token's adapter. The function returns one tensor, reads the weights, and changes only the KV cache, sequence states
    and, where permitted, the storage of its arguments. If `compile_head` returns a function, it also reads the last
    sampled tokens, a tensor of core.

    A second call with equal arguments stores the same keys and values, but not the same states: the slot that it reads
    may be the slot that the first call wrote. A backend that runs a step twice gives one of the runs write slots -1.

    Core has submitted all work that reads a result before it calls a function of the same backend again, so a result
    may lie in memory that the next call overwrites (since contract 1.1).
    """

    @abstractmethod
    def compile(self, function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        """A callable with the same results. With `dynamic`, shapes may vary without recompilation.

        It is called from the thread that called `compile`. It may be `function` itself.
        """

    def compile_head(self, function: Callable[..., Any]) -> Callable[..., Any] | None:
        """Compiles the function that follows the model in a step where every row samples greedily. Since contract 1.1.

        Optional; by default None, and core calls the function as it is. Core calls the result only in steps whose
        `BatchLayout.capture` is set, with sizes that depend on the step's shape alone. Its arguments are the result of
        the model's compiled function, [T, hidden_size], then tensors and None. It selects the rows that sample,
        multiplies by the head, selects the largest logits, stores the tokens in a tensor of core, and returns one
        tensor. Calls with equal arguments have equal effects.
        """
        return None

    def compile_encoder(self, function: Callable[..., Any]) -> Callable[..., Any] | None:
        """Compiles the layers of an encoder whose items have one shape. Since contract 1.1.

        Optional; by default None, and core calls the function as it is. It takes one tensor, whose first dimension is
        the number of items, reads the weights, changes nothing, and returns one tensor. The number of items differs
        from call to call; the other dimensions do not. Core reads the result before it calls a function of the same
        backend again.
        """
        return None

    def cache_key(self) -> str:
        """Changes whenever compiled results from before must not be reused (compiler, plugin or device changed).

        Optional since contract 1.1: core does not call it. The default differs in each process, so nothing compiled
        is reused by another one.
        """
        return f"{type(self).__module__}.{type(self).__qualname__}-{_process_token()}"

    def needs_warm_up(self) -> bool:
        """Whether core calls a compiled function a few times before the first request, since the first calls are slow.

        Since contract 1.1; true by default. Where the platform's `shapes` have no buckets, these calls are a decode
        step of one request, a prompt of one request, and prompts of several, so that a compiler with dynamic shapes
        sees each size vary.
        """
        return True


@functools.cache
def _process_token() -> str:
    return uuid.uuid4().hex
