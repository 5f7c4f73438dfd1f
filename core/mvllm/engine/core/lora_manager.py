"""The engine core's LRU list of LoRA adapters that the workers have loaded.

The engine core loads and unloads adapters on all workers, so that every rank has the same ones. An adapter is loaded
when a request first names it, before that request is queued. With too many loaded, the least recently used one without
a running request is unloaded, and loaded again when its next request starts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from mvllm.config.engine_config import LoRAConfig
from mvllm.config.model_fingerprint import files_fingerprint
from mvllm.errors import MvllmError, PlatformError, RequestError, WorkerDiedError, WorkerStuckError
from mvllm.executor.interface import Executor
from mvllm.logging import get_logger
from mvllm.messages.lora import MAX_ADAPTER_RECORDS, LoRARequest
from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.models.peft_adapter import adapter_files, folder_fingerprint

logger = get_logger(__name__)

_TRIAL_ID = -1
"""Id of an adapter that is loaded as a trial. No request has it."""


class LoRAManager:
    """Loads adapters on the workers of one engine core.

    Args:
        config: The limits.
        executor: Calls the workers.
        hashes_files: Compute the hash of each adapter's files, see `file_hash`.
    """

    def __init__(self, config: LoRAConfig, executor: Executor, *, hashes_files: bool = False) -> None:
        self._config = config
        self._executor = executor
        self._loaded: dict[int, LoRARequest] = {}  # least recently used first
        self._replaced: dict[LoRARequest, LoRARequest] = {}
        """The adapter that has replaced another one of its id, for the last MAX_ADAPTER_RECORDS. Requests that named
        the other one use it.
        """
        self._file_states: dict[LoRARequest, tuple[int, ...]] = {}
        """The fingerprint of an adapter's files when they were first read. Kept when the adapter is unloaded, because
        the prefix cache keeps blocks that were computed with it; see `has_many_records`.
        """
        self._hashes_files = hashes_files
        self._file_hashes: dict[LoRARequest, str] = {}  # as long as their fingerprints

    @property
    def ids(self) -> list[int]:
        """The adapters that are loaded, least recently used first."""
        return list(self._loaded)

    def file_hash(self, request: LoRARequest) -> str | None:
        """The hash of the files with which requests that name this adapter are computed, equal in all engines.

        None if they were not read yet, or could not be hashed.
        """
        return self._file_hashes.get(self._replaced.get(request, request))

    def has_replaced(self, lora_int_id: int) -> bool:
        """Whether cached blocks may have the keys of an adapter that the one with this id has replaced."""
        return not self._hashes_files and any(old.lora_int_id == lora_int_id for old in self._replaced)

    @property
    def has_many_records(self) -> bool:
        """Whether `forget_unloaded` is due."""
        return len(self._file_states) > MAX_ADAPTER_RECORDS + len(self._loaded)

    def forget_unloaded(self) -> None:
        """Forgets the files of adapters that are not loaded. The caller drops the prefix cache, which may have results
        of them."""
        loaded = set(self._loaded.values())
        self._file_states = {request: state for request, state in self._file_states.items() if request in loaded}
        self._file_hashes = {request: found for request, found in self._file_hashes.items() if request in loaded}

    def add(self, request: LoRARequest, in_use: Collection[int]) -> None:
        """Loads an adapter. If running requests use all places, it is loaded and unloaded again, as a check.

        Args:
            in_use: The ids of running requests' adapters.

        Raises:
            RequestError: The workers cannot load its files, or its id belongs to another adapter.
        """
        self._add(self._replaced.get(request, request), in_use)

    def _add(self, request: LoRARequest, in_use: Collection[int]) -> None:
        known = self._loaded.get(request.lora_int_id)
        if known is not None and known != request and request.lora_int_id not in in_use:
            self._unload(request.lora_int_id)
            known = None
        if known is not None and known != request:
            raise RequestError(
                f"lora_int_id {request.lora_int_id} belongs to {known.lora_name!r} ({known.lora_path}), which running "
                f"requests use. Choose another id for {request.lora_name!r}.",
                parameter="lora_request",
            )
        if known is None:
            has_room = self._evict_idle_adapter(in_use)
            self._load(request)
            if not has_room:
                self._executor.collective_rpc("remove_lora", (request.lora_int_id,))
                return
        self._loaded.pop(request.lora_int_id, None)
        self._loaded[request.lora_int_id] = request  # the newest

    def replace(self, request: LoRARequest, in_use: Collection[int]) -> None:
        """Loads the files of an adapter anew, in place of the loaded adapter of its id, also while requests use it.

        The caller drops the prefix cache. If the files cannot be used, the present adapter stays.

        Args:
            in_use: As for `add`.

        Raises:
            RequestError: The workers cannot load the files.
        """
        known = self._loaded.get(request.lora_int_id)
        if known is None:
            self._forget_files(request)
            self._add(request, in_use)
            self._redirect_to(request)
            return
        self._try_to_load(request)
        state, file_hash = self._file_states[known], self._file_hashes.get(known)
        self._forget_files(known)
        self._forget_files(request)
        self._unload(request.lora_int_id)
        try:
            self._load(request)
        except RequestError:
            self._file_states[known] = state
            if file_hash is not None:
                self._file_hashes[known] = file_hash
            self._load(known)
            self._loaded[known.lora_int_id] = known
            raise
        self._loaded[request.lora_int_id] = request
        self._replaced[known] = request
        self._redirect_to(request)

    def _try_to_load(self, request: LoRARequest) -> None:
        """Raises RequestError if the files cannot be used: those of the present adapter may be overwritten already."""
        try:
            self._executor.collective_rpc("add_lora", (msgspec.structs.replace(request, lora_int_id=_TRIAL_ID),))
        finally:
            self._executor.collective_rpc("remove_lora", (_TRIAL_ID,))

    def _redirect_to(self, request: LoRARequest) -> None:
        """Lets requests that named any earlier adapter of an id use this one."""
        earlier = [old for old in self._replaced if old.lora_int_id == request.lora_int_id]
        self._replaced.update(dict.fromkeys(earlier, request))
        self._replaced.pop(request, None)
        while len(self._replaced) > MAX_ADAPTER_RECORDS:
            del self._replaced[next(iter(self._replaced))]

    def remove(self, lora_int_id: int, in_use: Collection[int]) -> bool:
        """Unloads an adapter; False, with nothing changed, if it is not loaded or a running request uses it."""
        request = self._loaded.get(lora_int_id)
        if request is None or lora_int_id in in_use:
            return False
        self._unload(lora_int_id)
        self._replaced = {old: new for old, new in self._replaced.items() if old.lora_int_id != lora_int_id}
        return True

    def clear(self) -> None:
        """Empties the list, after the workers have released their weights and all adapters."""
        self._loaded.clear()

    def load_for_step(self, plan: SchedulerOutput, in_use: Callable[[], Collection[int]]) -> dict[int, str]:
        """Loads the adapters of requests that start in a step, before it is executed.

        Args:
            in_use: Returns the ids of running requests' adapters, those of the step included. Called at most once: it
                looks at each running request.

        Returns:
            Errors by position in the step's batch, of rows whose adapter files are missing or have changed. The step
            computes these rows as well.
        """
        errors: dict[int, str] = {}
        used: Collection[int] | None = None
        for new in plan.new_requests:
            if new.lora_request is not None:
                used = in_use() if used is None else used
                try:
                    self.add(new.lora_request, used)
                except (RequestError, PlatformError) as e:
                    if new.row in plan.rows:  # else the other side of a guided request is, with the same adapter
                        errors[plan.rows.index(new.row)] = str(e)
        return errors

    def _load(self, request: LoRARequest) -> None:
        state = folder_fingerprint(request.lora_path)
        is_new = request not in self._file_states
        if self._file_states.setdefault(request, state) != state:
            raise RequestError(
                f"The files of the adapter {request.lora_name!r} in {request.lora_path} have changed since they were "
                "first read, and the prefix cache may hold results of the old ones. Load them under another id.",
                parameter="lora_request",
            )
        try:
            self._executor.collective_rpc("add_lora", (request,))
            if self._hashes_files and is_new:
                self._hash_files(request)
        except (WorkerDiedError, WorkerStuckError):
            raise
        except MvllmError:
            if is_new:  # nothing has been computed with these files
                self._forget_files(request)
            self._executor.collective_rpc("remove_lora", (request.lora_int_id,))  # some ranks may have loaded it
            raise

    def _hash_files(self, request: LoRARequest) -> None:
        """Hashes the files that the workers have just read."""
        try:
            found = files_fingerprint(adapter_files(request.lora_path))
        except OSError as e:
            logger.warning("The files of the adapter %r cannot be read for their hash: %s", request.lora_name, e)
            return
        if folder_fingerprint(request.lora_path) == self._file_states[request]:  # else nobody knows what was loaded
            self._file_hashes[request] = found

    def _forget_files(self, request: LoRARequest) -> None:
        self._file_states.pop(request, None)
        self._file_hashes.pop(request, None)

    def _evict_idle_adapter(self, in_use: Collection[int]) -> bool:
        """Unloads the least recently used idle adapter if `max_cpu_loras` are loaded; returns whether one more fits."""
        if len(self._loaded) < self._config.max_cpu_loras:
            return True
        idle = next((lora_int_id for lora_int_id in self._loaded if lora_int_id not in in_use), None)
        if idle is not None:
            self._unload(idle)
        return idle is not None

    def _unload(self, lora_int_id: int) -> None:
        self._executor.collective_rpc("remove_lora", (lora_int_id,))
        del self._loaded[lora_int_id]
