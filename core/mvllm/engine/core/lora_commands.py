"""LoRA adapters of an engine core: loading, unloading and replacing them."""

from __future__ import annotations

from mvllm.engine.core.answers import answers
from mvllm.engine.core.lora_manager import LoRAManager
from mvllm.engine.core.sleep import WEIGHTS, ReleasedMemory
from mvllm.engine.core.step_pipeline import StepPipeline
from mvllm.engine.core.weight_commands import WeightCommands
from mvllm.engine.core.weight_updates import WeightUpdateManager
from mvllm.errors import EngineSleepingError, RequestError
from mvllm.messages.commands import AddLoRA, RemoveLoRA, UpdateLoRA
from mvllm.messages.lora import LoRARequest
from mvllm.scheduler.scheduler import Scheduler


class LoRACommands:
    """Changes the loaded adapters.

    Args:
        manager: Loads adapters on the workers; None in an engine without LoRA.
        manager_of_weights, weights: A replaced adapter is a weight update.
        memory: What sleeps.
        scheduler, steps: Those of the engine core.
    """

    def __init__(
        self,
        manager: LoRAManager | None,
        manager_of_weights: WeightUpdateManager,
        weights: WeightCommands,
        memory: ReleasedMemory,
        scheduler: Scheduler,
        steps: StepPipeline,
    ) -> None:
        self._manager = manager
        self._manager_of_weights = manager_of_weights
        self._weights = weights
        self._memory = memory
        self._scheduler = scheduler
        self._steps = steps

    @answers(AddLoRA)
    def add(self, request: LoRARequest) -> None:
        """Loads an adapter on all workers, unless it is loaded.

        Raises:
            RequestError: Its files do not fit this model, or its id belongs to another adapter.
            EngineSleepingError: The weights sleep.
        """
        if WEIGHTS in self._memory.tags:
            raise EngineSleepingError("The engine has been put to sleep. Wake it up (wake_up) before loading adapters.")
        manager = self.require()
        manager.add(request, self._scheduler.running_lora_ids)
        if manager.has_many_records:
            self._forget_computed()
            manager.forget_unloaded()

    @answers(RemoveLoRA)
    def remove(self, lora_int_id: int) -> bool:
        """Unloads an adapter; False if it is not loaded, or in use: then it is evicted later, when space is needed."""
        manager = self.require()
        has_other_names = manager.has_replaced(lora_int_id)
        is_removed = manager.remove(lora_int_id, self._scheduler.running_lora_ids)
        if is_removed and has_other_names:  # a request may load the adapter that it names, which was replaced before
            self._forget_computed()
        return is_removed

    @answers(UpdateLoRA)
    def update(self, request: LoRARequest) -> None:
        """Loads an adapter anew, in place of the loaded one of its id. Its running requests go on with the new one.

        Raises:
            As `add`.
        """
        manager, is_own = self.require(), not self._manager_of_weights.is_open
        if is_own:
            self._manager_of_weights.check_usable()  # an adapter alone does not mend the weights
            self._weights.start()
        try:
            manager.replace(request, self._scheduler.running_lora_ids)
        except BaseException:
            if is_own:
                self._weights.abandon()
            raise
        if is_own:
            self._weights.finish()
        else:
            self._scheduler.forget_computed(restart=False)  # the open update may be abandoned

    def require(self) -> LoRAManager:
        """
        Raises:
            RequestError: The engine takes no adapters.
        """
        if self._manager is None:
            raise RequestError(
                "The engine was started without enable_lora: it takes no adapters.", parameter="lora_request"
            )
        return self._manager

    def _forget_computed(self) -> None:
        self._steps.collect_all()
        self._scheduler.forget_computed(restart=False)
