"""LoRA adapters of EngineCore: loading, unloading and replacing them."""

from __future__ import annotations

from mvllm.engine.core.lora_manager import LoRAManager
from mvllm.engine.core.rollouts import CoreRollouts
from mvllm.engine.core.sleep import WEIGHTS
from mvllm.errors import EngineSleepingError, RequestError
from mvllm.messages.lora import LoRARequest


class CoreAdapters(CoreRollouts):
    """Base of EngineCore."""

    _lora_manager: LoRAManager | None

    def add_lora(self, request: LoRARequest) -> bool:
        """Loads an adapter on all workers, unless it is loaded.

        Raises:
            RequestError: Its files do not fit this model, or its id belongs to another adapter.
            EngineSleepingError: The weights sleep.
        """
        if WEIGHTS in self._released_memory:
            raise EngineSleepingError("The engine has been put to sleep. Wake it up (wake_up) before loading adapters.")
        manager = self._required_lora_manager
        manager.add(request)
        if manager.has_many_records:
            self._collect_all_steps()
            self.scheduler.forget_computed(restart=False)
            manager.forget_unloaded()
        return True

    def remove_lora(self, lora_int_id: int) -> bool:
        """Unloads an adapter; False if it is not loaded, or in use: then it is evicted later, when space is needed."""
        manager = self._required_lora_manager
        has_other_names = manager.has_replaced(lora_int_id)
        is_removed = manager.remove(lora_int_id)
        if is_removed and has_other_names:  # a request may load the adapter that it names, which was replaced before
            self._collect_all_steps()
            self.scheduler.forget_computed(restart=False)
        return is_removed

    def update_lora(self, request: LoRARequest) -> bool:
        """Loads an adapter anew, in place of the loaded one of its id. Its running requests go on with the new one.

        A weight update: part of the open one, or one of its own.

        Raises:
            As `add_lora`.
        """
        manager, is_own = self._required_lora_manager, not self._weights.is_open
        if is_own:
            self._weights.check_usable()  # an adapter alone does not mend the weights
            self.start_weight_update()
        try:
            manager.replace(request)
        except BaseException:
            if is_own:
                self.abandon_weight_update()
            raise
        if is_own:
            self.finish_weight_update()
        else:
            self.scheduler.forget_computed(restart=False)  # the open update may be abandoned
        return True

    @property
    def _required_lora_manager(self) -> LoRAManager:
        if self._lora_manager is None:
            raise RequestError(
                "The engine was started without enable_lora: it takes no adapters.", parameter="lora_request"
            )
        return self._lora_manager
