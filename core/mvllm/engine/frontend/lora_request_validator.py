"""Validation of LoRA requests in the front end, before the engine core loads the adapter."""

from __future__ import annotations

from mvllm.config.engine_config import EngineConfig
from mvllm.errors import ModelError, RequestError
from mvllm.messages.field_checks import is_unicode
from mvllm.messages.lora import MAX_ADAPTER_RECORDS, LoRARequest
from mvllm.models.peft_adapter import read_peft_adapter

_MAX_LORA_ID = 2**31 - 1
_MAX_NAME_LENGTH = 256
_MAX_PATH_LENGTH = 4096


class LoRARequestValidator:
    """Checks LoRA requests, and records the adapters that the engine core has loaded.

    Args:
        config: The engine's configuration in use.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._lora = config.lora
        self._by_id: dict[int, LoRARequest] = {}  # the last MAX_ADAPTER_RECORDS

    @property
    def ids(self) -> set[int]:
        """Ids of the loaded adapters."""
        return set(self._by_id)

    def validate(self, request: object) -> LoRARequest:
        """Returns the request if its fields are valid.

        Raises:
            RequestError: A field is invalid, LoRA is not enabled, or the id belongs to another adapter.
        """
        if self._lora is None:
            raise _request_error("The engine was started without enable_lora, so it accepts no LoRA adapters.")
        if not isinstance(request, LoRARequest):
            raise _request_error(
                f"lora_request must be a LoRARequest(lora_name, lora_int_id, lora_path); found a value of type "
                f"{type(request).__name__}."
            )
        name, number, path = request.lora_name, request.lora_int_id, request.lora_path
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_LENGTH or not name.isprintable():
            raise _request_error(f"lora_name must be a text of 1 to {_MAX_NAME_LENGTH} printable characters.")
        if isinstance(number, bool) or not isinstance(number, int) or not 0 < number <= _MAX_LORA_ID:
            raise _request_error(f"lora_int_id must be an integer from 1 to {_MAX_LORA_ID}.")
        if not isinstance(path, str) or not 0 < len(path) <= _MAX_PATH_LENGTH or "\0" in path or not is_unicode(path):
            raise _request_error("lora_path must be the path of the adapter's folder, as a text.")
        known = self._by_id.get(number, request)
        if known != request:
            raise _request_error(
                f"The adapter id {number} belongs to {known.lora_name!r} in {known.lora_path}. Choose another id, or "
                "remove that adapter first."
            )
        return request

    def validate_update(self, request: LoRARequest) -> None:
        """Checks an adapter that replaces the one of its id, and its files.

        Raises:
            RequestError: A field is invalid, its files are not usable, or the id belongs to another name.
        """
        known = self._by_id.pop(request.lora_int_id, None) if isinstance(request, LoRARequest) else None
        try:
            self.validate(request)
            if known is not None and known.lora_name != request.lora_name:
                raise _request_error(
                    f"The adapter id {request.lora_int_id} belongs to {known.lora_name!r}: an update keeps the name."
                )
            self.check_files(request)
        finally:
            if known is not None:
                self._by_id[known.lora_int_id] = known

    def is_loaded(self, request: LoRARequest) -> bool:
        """Whether the engine core has loaded the adapter."""
        return request.lora_int_id in self._by_id

    def check_files(self, request: LoRARequest) -> None:
        """Checks an adapter's files, without reading the weights.

        Raises:
            RequestError: They are missing, damaged, or not supported.
        """
        assert self._lora is not None
        try:
            read_peft_adapter(request.lora_path, self._lora.max_lora_rank)
        except ModelError as e:
            raise _request_error(f"The adapter {request.lora_name!r} cannot be loaded: {e}") from e

    def add(self, request: LoRARequest) -> None:
        """Records that the engine core has loaded the adapter."""
        self._by_id.pop(request.lora_int_id, None)
        self._by_id[request.lora_int_id] = request
        if len(self._by_id) > MAX_ADAPTER_RECORDS:  # loaded again by its next request
            del self._by_id[next(iter(self._by_id))]

    def remove(self, lora_int_id: int) -> bool:
        """Forgets an adapter. Returns whether it was recorded."""
        return self._by_id.pop(lora_int_id, None) is not None


def _request_error(message: str) -> RequestError:
    return RequestError(message, parameter="lora_request")
