"""Commands of the engine: what a front end asks of its engine cores, which answer between two steps.

A verb of the engine is one class here, with its arguments, its result and what the processes in between have to know of
it. LLMEngine and AsyncLLM send it (`client.call`), and one method in the engine core answers it (`@answers`): of
EngineCore, or of a part that it passes to Answers. Nothing between the two knows the verbs. LLM has a method that calls
that of LLMEngine.

With several replicas each of them answers, and `join` makes one answer of theirs. The default suits flags, lists, and
answers that are the same everywhere: a verb whose answers are to be added up overrides it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, Generic, TypeVar, Union, cast

import msgspec

from mvllm.errors import RequestError
from mvllm.messages.lora import LoRARequest
from mvllm.messages.weights import WeightTransferInfo, WeightUpdate

R = TypeVar("R")


def name_of(command: type[EngineCommand[Any]]) -> str:
    """The verb of a class: `wake_up`."""
    return str(command.__struct_config__.tag)


class EngineCommand(msgspec.Struct, Generic[R], frozen=True, array_like=True):
    """A command whose answer is an `R`: numbers, texts, bytes, lists and dicts.

    Attributes:
        is_long: It may take as long as the start of an engine core; `step_timeout` does not apply to it.
        drops_prefixes: Afterwards no block of the prefix cache holds what it did.
        uses_one_replica: Any one replica answers it for all of them.
        leaves_difference: Replicas differ if only some of them have done it; False for a command that changes nothing.
            The error of a command that has failed on some replicas says so.
    """

    is_long: ClassVar[bool] = False
    drops_prefixes: ClassVar[bool] = False
    uses_one_replica: ClassVar[bool] = False
    leaves_difference: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """The verb: `wake_up`."""
        return name_of(type(self))

    def for_replica(self, num_workers_before: int) -> EngineCommand[R]:
        """The command for one of several replicas.

        Args:
            num_workers_before: Workers of the replicas before it.
        """
        return self

    @property
    def withdrawal(self) -> EngineCommand[Any] | None:
        """What ends the command on replicas that have begun it, if another has refused; None for nothing."""
        return None

    def join(self, answers: Sequence[R]) -> R:
        """The answer of all replicas: whether all returned True; of other answers the first, and lists joined."""
        if all(isinstance(answer, bool) for answer in answers):
            return cast(R, all(answers))
        if isinstance(answers[0], list):
            return cast(R, list(chain.from_iterable(cast("Sequence[list[Any]]", answers))))
        return answers[0]


# ---------------------------------------------------------------------------------------------------------------- state


class CheckHealth(EngineCommand[None], tag="check_health", frozen=True, array_like=True):
    """Raises unless every worker answers a call."""

    leaves_difference: ClassVar[bool] = False


class ResetPrefixCache(EngineCommand[bool], tag="reset_prefix_cache", frozen=True, array_like=True):
    """Clears the prefix cache. False, with nothing changed, while requests use blocks."""

    drops_prefixes: ClassVar[bool] = True


class ResetEncoderCache(EngineCommand[bool], tag="reset_encoder_cache", frozen=True, array_like=True):
    """Drops encoder results that no running request uses. Whether none is left."""


class CallWorkers(EngineCommand[list[Any]], tag="call_workers", frozen=True, array_like=True):
    """Calls a method of `worker_extension_cls` on every worker. The results in rank order."""

    is_long: ClassVar[bool] = True
    method: str
    args: list[Any]
    kwargs: dict[str, Any]


class CallModel(EngineCommand[Any], tag="call_model", frozen=True, array_like=True):
    """Calls a method of the model, see `WorkerProtocol.call_model`. The first result but None and empty bytes."""

    uses_one_replica: ClassVar[bool] = True
    method: str
    args: list[Any]


# ---------------------------------------------------------------------------------------------------------------- sleep


class CheckSleep(EngineCommand[None], tag="check_sleep", frozen=True, array_like=True):
    """Checks what can be checked before `Sleep` ends requests. Changes nothing."""

    is_long: ClassVar[bool] = True
    leaves_difference: ClassVar[bool] = False
    level: int


class Sleep(EngineCommand[None], tag="sleep", frozen=True, array_like=True):
    """Ends all requests with an error, and releases memory: the KV cache, and the weights, which level 1 copies to the
    host."""

    is_long: ClassVar[bool] = True
    drops_prefixes: ClassVar[bool] = True
    level: int


class WakeUp(EngineCommand[bool], tag="wake_up", frozen=True, array_like=True):
    """Allocates released memory again. Whether nothing sleeps any more.

    Attributes:
        tags: `weights`, `kv_cache` or both; empty for everything that sleeps.
    """

    is_long: ClassVar[bool] = True
    tags: list[str] = []


# ---------------------------------------------------------------------------------------------------------------- pause


class PauseScheduler(EngineCommand[bool], tag="pause_scheduler", frozen=True, array_like=True):
    """Stops scheduling. Whether the scheduler is paused already.

    Attributes:
        mode: `abort` ends all requests with the outputs so far. `wait` lets them finish first, see
            `IsSchedulerPaused`. `keep` stops them at the end of the step in flight.
        clear_cache: Drop the prefix cache. With `keep`, the requests' own keys and values, too.
    """

    mode: str
    clear_cache: bool


class IsSchedulerPaused(EngineCommand[bool], tag="is_scheduler_paused", frozen=True, array_like=True):
    """Whether no step runs until `ResumeScheduler`, or until the end of a weight update."""

    leaves_difference: ClassVar[bool] = False


class IsSchedulerRunning(EngineCommand[bool], tag="is_scheduler_running", frozen=True, array_like=True):
    """Whether the scheduler neither is paused nor will be when the present requests have finished."""

    leaves_difference: ClassVar[bool] = False


class ResumeScheduler(EngineCommand[None], tag="resume_scheduler", frozen=True, array_like=True):
    """Continues scheduling."""


# -------------------------------------------------------------------------------------------------------------- weights


class InitWeightTransfer(EngineCommand[None], tag="init_weight_transfer", frozen=True, array_like=True):
    """Lets the workers begin to join the process group of a trainer."""

    is_long: ClassVar[bool] = True
    leaves_difference: ClassVar[bool] = False
    info: WeightTransferInfo

    def for_replica(self, num_workers_before: int) -> InitWeightTransfer:
        rank_offset = self.info.rank_offset + num_workers_before
        return InitWeightTransfer(msgspec.structs.replace(self.info, rank_offset=rank_offset))

    @property
    def withdrawal(self) -> EngineCommand[Any]:
        return HasJoinedWeightTransfer(give_up=True)


class HasJoinedWeightTransfer(EngineCommand[bool], tag="has_joined_weight_transfer", frozen=True, array_like=True):
    """Whether all workers have joined the group of `InitWeightTransfer`.

    Attributes:
        give_up: Stop waiting.
    """

    leaves_difference: ClassVar[bool] = False
    give_up: bool = False


class StartWeightUpdate(EngineCommand[None], tag="start_weight_update", frozen=True, array_like=True):
    """Pauses the scheduler at the end of the step in flight, and begins a weight update."""

    is_long: ClassVar[bool] = True


class UpdateWeights(EngineCommand[None], tag="update_weights", frozen=True, array_like=True):
    """Loads a part of the weights. Without an open update, it is one of its own."""

    is_long: ClassVar[bool] = True
    drops_prefixes: ClassVar[bool] = True
    update: WeightUpdate


class FinishWeightUpdate(EngineCommand[int], tag="finish_weight_update", frozen=True, array_like=True):
    """Ends a weight update, drops the prefix cache, and resumes if `StartWeightUpdate` has paused. The new version.

    Attributes:
        version: The new version of the weights; None for one more than the last.
        reset_running_requests: Compute the keys and values of running requests again, with the new weights.
    """

    is_long: ClassVar[bool] = True
    drops_prefixes: ClassVar[bool] = True
    version: int | None = None
    reset_running_requests: bool = False


class AbandonWeightUpdate(EngineCommand[None], tag="abandon_weight_update", frozen=True, array_like=True):
    """Ends a weight update without its remaining parts; if some were written, the weights are unusable."""


class WeightInfo(EngineCommand[dict[str, Any]], tag="weight_info", frozen=True, array_like=True):
    """`weight_version`, `is_updating`, and `failure`: why the weights are unusable, or None."""

    leaves_difference: ClassVar[bool] = False

    def join(self, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """That of a replica whose weights are unusable, if there is one."""
        return next((info for info in answers if info["failure"] is not None), answers[0])


# ------------------------------------------------------------------------------------------------------------- adapters


class AddLoRA(EngineCommand[None], tag="add_lora", frozen=True, array_like=True):
    """Loads an adapter on all workers, unless it is loaded."""

    request: LoRARequest


class RemoveLoRA(EngineCommand[bool], tag="remove_lora", frozen=True, array_like=True):
    """Unloads an adapter. False if it is not loaded, or in use: then it is evicted later, when space is needed."""

    lora_int_id: int


class UpdateLoRA(EngineCommand[None], tag="update_lora", frozen=True, array_like=True):
    """Loads an adapter anew, in place of the loaded one of its id. A weight update, or part of one."""

    is_long: ClassVar[bool] = True
    request: LoRARequest


# ---------------------------------------------------------------------------------------------------------------- names


COMMANDS: Mapping[str, type[EngineCommand[Any]]] = {name_of(each): each for each in EngineCommand.__subclasses__()}
"""All commands by name."""

_DECODER = msgspec.msgpack.Decoder(Union[tuple(COMMANDS.values())])  # noqa: UP007  (of a tuple)


def decode_command(encoded: msgspec.Raw) -> EngineCommand[Any]:
    """
    Raises:
        RequestError: An argument has a wrong type.
    """
    try:
        command: EngineCommand[Any] = _DECODER.decode(encoded)
    except msgspec.ValidationError as e:
        raise RequestError(f"The engine core does not accept the command: {e}") from e
    return command
