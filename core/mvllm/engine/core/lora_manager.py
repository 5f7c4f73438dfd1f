"""Which LoRA adapters the workers have loaded: the engine core's list, by which all of them stay alike.

Workers load and forget when they are told to, so that every rank has the same ones whatever happens. An adapter is read
when somebody first asks for it, before its request is queued; when there are too many, the one that was used least
recently and that no running request has gives way, and is read again when its next request begins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from mvllm.config.engine_config import LoRAConfig
from mvllm.errors import MvllmError, PlatformError, RequestError, WorkerDiedError, WorkerStuckError
from mvllm.executor.interface import Executor
from mvllm.messages.lora import LoRARequest
from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.models.peft_adapter import folder_fingerprint


class LoRAManager:
    """Loads adapters on the workers of one engine core.

    Args:
        config: How many there may be.
        executor: Reaches the workers.
        in_use: The adapters of the requests that run.
    """

    def __init__(self, config: LoRAConfig, executor: Executor, in_use: Callable[[], Collection[int]]) -> None:
        self._config = config
        self._executor = executor
        self._in_use = in_use
        self._loaded: dict[int, LoRARequest] = {}  # least recently used first
        self._file_states: dict[LoRARequest, tuple[int, ...]] = {}
        """Of the files, when they were first read. Kept when an adapter is forgotten: what was computed with it stays
        in the prefix cache.
        """

    @property
    def ids(self) -> list[int]:
        """The adapters that are loaded, least recently used first."""
        return list(self._loaded)

    def add(self, request: LoRARequest) -> None:
        """Loads an adapter, or at least makes sure that it could be: with all places in use, its turn comes later.

        Raises:
            RequestError: The workers cannot use its files, or its id is another adapter's.
        """
        known = self._loaded.get(request.lora_int_id)
        if known is not None and known != request and request.lora_int_id not in self._in_use():
            self._unload(request.lora_int_id)
            known = None
        if known is not None and known != request:
            raise RequestError(
                f"The adapter id {request.lora_int_id} is that of {known.lora_name!r} ({known.lora_path}), which "
                f"requests under way have; {request.lora_name!r} needs another.",
                parameter="lora_request",
            )
        if known is None:
            has_room = self._evict_idle_adapter()
            self._load(request)
            if not has_room:
                self._executor.collective_rpc("remove_lora", (request.lora_int_id,))
                return
        self._loaded.pop(request.lora_int_id, None)
        self._loaded[request.lora_int_id] = request  # the newest

    def remove(self, lora_int_id: int) -> bool:
        """Forgets an adapter; False, with nothing changed, where it is not loaded or a running request has it."""
        request = self._loaded.get(lora_int_id)
        if request is None or lora_int_id in self._in_use():
            return False
        self._unload(lora_int_id)
        return True

    def clear(self) -> None:
        """The workers have dropped their models, and all adapters with them."""
        self._loaded.clear()

    def load_for_step(self, plan: SchedulerOutput) -> dict[int, str]:
        """Loads what the requests need that begin in a plan, before it is executed.

        Returns:
            Why rows cannot be computed as asked, by position in the plan's batch: the files of their adapters are not
            there any more, or have changed. The plan is executed with them all the same.
        """
        errors: dict[int, str] = {}
        for new in plan.new_requests:
            if new.lora_request is not None:
                try:
                    self.add(new.lora_request)
                except (RequestError, PlatformError) as e:
                    errors[plan.rows.index(new.row)] = str(e)
        return errors

    def _load(self, request: LoRARequest) -> None:
        state = folder_fingerprint(request.lora_path)
        is_new = request not in self._file_states
        if self._file_states.setdefault(request, state) != state:
            raise RequestError(
                f"The files of the adapter {request.lora_name!r} in {request.lora_path} have changed since they were "
                "first read, and what was computed with them may be reused. Load them under another id.",
                parameter="lora_request",
            )
        try:
            self._executor.collective_rpc("add_lora", (request,))
        except (WorkerDiedError, WorkerStuckError):
            raise
        except MvllmError:
            if is_new:  # nothing has been computed with it: other files may take their place
                del self._file_states[request]
            self._executor.collective_rpc("remove_lora", (request.lora_int_id,))  # where it has been loaded
            raise

    def _evict_idle_adapter(self) -> bool:
        """Forgets the adapter that was used least recently, if there are too many and one is not in use."""
        if len(self._loaded) < self._config.max_cpu_loras:
            return True
        in_use = self._in_use()
        idle = next((lora_int_id for lora_int_id in self._loaded if lora_int_id not in in_use), None)
        if idle is not None:
            self._unload(idle)
        return idle is not None

    def _unload(self, lora_int_id: int) -> None:
        self._executor.collective_rpc("remove_lora", (lora_int_id,))
        del self._loaded[lora_int_id]
