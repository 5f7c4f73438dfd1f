"""The methods of a worker that executors call. A platform without torch devices implements its own worker class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from mvllm.contract import Phase, is_optional, optional, phase
from mvllm.messages.lora import LoRARequest
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.messages.weights import WeightTransferInfo, WeightUpdate


@phase(Phase.WORKER)
@dataclass(frozen=True)
class KVCacheNeeds:
    """Bytes per token, block sizes and windows of one worker's KV cache.

    Returned by `WorkerProtocol.kv_cache_needs`.

    Attributes:
        bytes_per_token: Bytes of one token on this worker, over all its layers.
        block_sizes: Tokens per block that all its attention backends support, the preferred one first.
        layer_windows: Sliding window of each layer in tokens, or None for full attention; the layers take equal shares
            of the bytes. Empty if all layers have full attention.
        state_bytes: Bytes of one state slot on this worker, over all its layers; 0 for models without sequence states.
            Since contract 1.1.
        fixed_state_bytes: Bytes of states beside the slots, however many slots there are, such as memory to which
            padding writes. Since contract 1.1.
    """

    bytes_per_token: int
    block_sizes: tuple[int, ...]
    layer_windows: tuple[int | None, ...] = ()
    state_bytes: int = 0
    fixed_state_bytes: int = 0


@phase(Phase.WORKER)
@dataclass(frozen=True)
class HostBlockNeeds:
    """Bytes of one worker's part of a host block, and how they represent its contents.

    Returned by `WorkerProtocol.host_block_needs`. Since contract 1.1.

    Attributes:
        block_bytes: Bytes of one KV block on this worker, over all its layers; 0 without attention layers.
        state_bytes: Bytes of one state slot on this worker, over all its layers; 0 without sequence states.
        block_format: Layout, dtype, block size and sizes of heads and states of all its layers. Workers of equal rank
            with equal strings can load each other's host blocks, if they have equal weights.
    """

    block_bytes: int
    state_bytes: int
    block_format: str


def defined_together(kind: type, method: str, other: str) -> bool:
    """Whether a class gets two methods from the same base. False if a subclass overrides only one of them."""
    homes = [next((base for base in kind.__mro__ if name in vars(base)), None) for name in (method, other)]
    return homes[0] is homes[1] is not None


@phase(Phase.WORKER)
@runtime_checkable
class WorkerProtocol(Protocol):
    """The methods of a worker, in the order of calls. `collective_rpc` takes the name of one of them.

    Every method is called from one thread. The class that `Platform.worker_class` names is built as
    `cls(config: EngineConfig, platform: Platform, ctx: WorkerContext)`. Errors are returned with type, message,
    traceback, rank and phase; an error in `execute_model` stops the engine.
    """

    def init_device(self) -> None:
        """Binds the process to its device and joins its process groups."""

    def load_model(self) -> None:
        """Builds the model and loads this rank's share of the weights."""

    def kv_cache_needs(self) -> KVCacheNeeds:
        """After `load_model`: bytes per token and block sizes of the KV cache."""

    def available_kv_bytes(self) -> int:
        """After `load_model`: bytes that remain for the KV cache after a profiling step. May be negative."""

    @optional
    def update_max_model_len(self, max_model_len: int) -> None:
        """Before `group_layers`: no sequence has more than so many tokens, fewer than `ModelConfig.max_model_len`.

        Since contract 1.1. Called only with `ModelConfig.max_model_len_is_auto`. Layers are still grouped by the
        model's own length. A class may leave this method out; its buffers are then larger than they need be.
        """

    @optional
    def group_layers(self, windows: list[int | None]) -> None:
        """Before `allocate_kv_cache`: the windows of the KV cache groups, each of which has its own block table.

        Called only if the `KVCacheNeeds` of all workers list windows, and different ones. A class that lists none
        may leave this method out. Layers of one window are assigned in turn to the groups of that window. A block then
        has the size of the largest group of this worker. A window of `max_model_len` or more counts as None.
        """

    @optional
    def allocate_states(self, num_slots: int) -> None:
        """Before `allocate_kv_cache`: allocates slots for the sequence states of every layer.

        Since contract 1.1. Called only if the `KVCacheNeeds` of a worker have `state_bytes`. A class that has none may
        leave this method out.

        Raises:
            MemoryError: They do not fit.
        """

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """Allocates the KV cache.

        Raises:
            MemoryError: It does not fit.
        """

    @optional
    def host_block_needs(self) -> HostBlockNeeds:
        """After `allocate_kv_cache`: bytes and format of this worker's part of a host block.

        Since contract 1.1. A class of a platform that does not claim `Capabilities.kv_transfer` may leave this method
        out, and `map_host_blocks`.
        """

    @optional
    def map_host_blocks(
        self,
        path: str,
        num_blocks: int,
        rank_bytes: list[int],
        states_path: str,
        num_states: int,
        state_rank_bytes: list[int],
    ) -> None:
        """After `host_block_needs`: opens the host blocks, in which plans then save blocks and states.

        A host block has the parts of all ranks, in order. Rank r copies to and from bytes
        [sum(rank_bytes[:r]), sum(rank_bytes[:r + 1])) of it. The mapping stays through `sleep` and `wake_up`, and
        another call replaces it. Since contract 1.1. A class of a platform that does not claim
        `Capabilities.kv_transfer` may leave this method out.

        Args:
            path: The file of the host blocks; empty if there are none, because no rank has attention layers.
            num_blocks: Host blocks in it.
            rank_bytes: `HostBlockNeeds.block_bytes` of all ranks.
            states_path, num_states, state_rank_bytes: The same for states; empty path without sequence states.

        Raises:
            CacheError: A file cannot be mapped.
        """

    def warm_up(self) -> None:
        """Compiles and captures the programs of the steps."""

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Runs one step. Plans come in the order of their `step`, and each must be applied.

        All pipeline stages but the last return an output without tokens. None means that the step has been submitted
        and its tokens are still on the device, see `collect_output`; this is for platforms with `async_copies`, with
        asynchronous scheduling and one pipeline stage.

        With `plan.masks_follow` the step is computed but not sampled, and the result is None; `sample_tokens` follows.

        Since contract 1.1, a plan may name blocks and states to save to host blocks and to load from them, also a plan
        without rows. They are copied before anything is computed: saves first, then loads. The output says that these
        copies are done, so all ranks return it for such a plan.
        """

    @optional
    def sample_tokens(self, step: int, mask_rows: list[int], token_masks: bytes) -> ModelRunnerOutput | None:
        """Samples the last step that `execute_model` computed, whose plan had `masks_follow`.

        Returns what `execute_model` returns without `masks_follow`. A class that cannot may leave this method out, or
        override `execute_model` without it; then no plan has `masks_follow`.

        Args:
            step: Number of the step, from the plan.
            mask_rows, token_masks: As in the plan. The request of a missing row has ended; its token is not used.
        """

    @optional
    def collect_output(self, step: int) -> ModelRunnerOutput:
        """Waits for the output of a step and returns it. Called once per step, in order.

        It is called for steps for which `execute_model` returned None, possibly after later steps have been submitted;
        and with `WorkerContext.every_rank_answers` for all steps on all pipeline stages but the last. A class that
        needs neither may leave this method out.
        """

    @optional
    def check_sleep(self, level: int) -> None:
        """Raises RequestError if `sleep` would fail, because the host has no memory for the weights. Changes nothing.

        Since contract 1.1. Called on all workers before requests are aborted. A class may leave this method out.
        """

    @optional
    def sleep(self, level: int) -> None:
        """Frees memory, between steps and while no request runs. A class that cannot may leave this method out.

        Has no effect on memory that is already freed. Called on all workers.

        Args:
            level: 1 frees the KV cache, and with `Capabilities.weight_offloading` moves the weights to host memory; 2
                drops both.
        """

    @optional
    def wake_up(self, tags: list[str]) -> None:
        """Allocates again what `sleep` freed: an empty KV cache, and the weights from the host or the checkpoint.

        Has no effect on memory that is already allocated. `warm_up` follows when everything is allocated. A class
        without `sleep` may leave this method out.

        Args:
            tags: A subset of `weights` and `kv_cache`, in this order. `kv_cache` is only requested with weights loaded.

        Raises:
            MemoryError: It does not fit. The call may be repeated.
        """

    @optional
    def add_lora(self, request: LoRARequest) -> None:
        """Loads an adapter between steps. An adapter of this id that is already loaded stays.

        Called on all workers, before the first plan with a request that uses the id. A class without LoRA may leave
        this method out, and `remove_lora`.

        Raises:
            RequestError: The files are not usable with this model. Nothing was changed.
        """

    @optional
    def remove_lora(self, lora_int_id: int) -> None:
        """Unloads an adapter that no running request uses. Unknown ids are ignored.

        A class without `add_lora` may leave this method out.
        """

    @optional
    def init_weight_transfer(self, info: WeightTransferInfo) -> None:
        """Begins to join the process group of a trainer, as rank `info.rank_offset` plus its own rank.

        Returns at once, and steps run on: the group is complete when the trainer has joined, see
        `has_joined_weight_transfer`. A class without weight updates may leave this method out.

        Raises:
            RequestError: The worker is still joining a group.
        """

    @optional
    def has_joined_weight_transfer(self, give_up: bool) -> bool:
        """Whether the worker has joined the group of `init_weight_transfer`.

        A class without weight updates may leave this method out.

        Args:
            give_up: Stop waiting for the group, if it is incomplete.

        Raises:
            RequestError: The group cannot be joined, or its timeout has passed. Raised once.
        """

    @optional
    def start_weight_update(self) -> None:
        """Begins to replace weights, between steps. Replaces an update that was not finished.

        `check_weights` and `update_weights` follow for each part of the update, then `check_weight_update` and
        `finish_weight_update`. No step runs until then. A class without weight updates may leave this method out.
        """

    @optional
    def check_weights(self, update: WeightUpdate) -> None:
        """Compares the tensors of one part with the model, and writes nothing.

        A class without weight updates may leave this method out.

        Raises:
            ModelError, RequestError: They do not fit.
        """

    @optional
    def update_weights(self, update: WeightUpdate) -> None:
        """Loads this rank's share of the tensors that `check_weights` has checked.

        An error leaves the weights incomplete: the engine computes nothing until another update is finished. A class
        without weight updates may leave this method out.
        """

    @optional
    def check_weight_update(self, whole: bool) -> None:
        """Raises RequestError if `finish_weight_update` needs further tensors. Writes nothing.

        A class without weight updates may leave this method out.

        Args:
            whole: Whether all tensors of the model are needed, because an earlier update has failed.
        """

    @optional
    def finish_weight_update(self) -> bool:
        """Ends the update. Returns whether `warm_up` has to be called, because captured steps were dropped.

        A class without weight updates may leave this method out.
        """

    @optional
    def abandon_weight_update(self) -> None:
        """Ends the update without its remaining tensors. What was written stays.

        A class without weight updates may leave this method out.
        """

    @optional
    def call_extension(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Calls a method of the class that the setting `worker_extension_cls` adds to the worker's.

        Core implements it, and a worker class may leave this method out. Arguments and result are numbers, texts,
        bytes, lists and dicts.
        """

    @optional
    def call_model(self, method: str, args: list[Any]) -> Any:
        """Calls a method of the model that the model's class offers (`CausalLM.remote_methods`). Called on all workers,
        between two steps.

        A class without such models may leave this method out.

        Args:
            method: Its name.
            args: Its arguments: numbers, texts, bytes, lists and dicts.

        Returns:
            Its result, of these types; None on workers that do not answer.

        Raises:
            RequestError: The model has no such method, or an argument is not valid.
        """

    @optional
    def decode_images(self, codes: bytes, rows: int, columns: int) -> bytes:
        """Decodes images of one size between two steps. Called on all workers.

        A class without models that generate images may leave this method out.

        Args:
            codes: int32 [n, rows * columns], little-endian: the codes of n images, from 0, row by row.
            rows, columns: Codes along each side of an image.

        Returns:
            uint8 [n, height, width, 3]: red, green, blue. Empty on workers without a pixel decoder: all but the first
            rank of the last pipeline stage.

        Raises:
            RequestError: The model generates no images, or a code does not exist.
        """

    def check_health(self) -> None:
        """Raises an error when the device does not respond."""

    def shutdown(self) -> None:
        """Releases all resources. Idempotent."""


WORKER_METHODS = frozenset(name for name in vars(WorkerProtocol) if not name.startswith("_"))
"""The names of a worker's methods."""

OPTIONAL_METHODS = frozenset(name for name in WORKER_METHODS if is_optional(vars(WorkerProtocol)[name]))
"""Those that a worker class may leave out."""
