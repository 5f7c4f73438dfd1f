"""LoRARequest: names the LoRA adapter of a request."""

from __future__ import annotations

import msgspec

from mvllm.messages.named_parameters import NamedParameters

MAX_ADAPTER_RECORDS = 4096
"""Adapters that a front end and an engine core remember beside the loaded ones. Requests may name any number."""


class LoRARequest(msgspec.Struct, frozen=True, metaclass=NamedParameters):
    """A LoRA adapter.

    All three fields together identify it. An engine accepts one adapter per id at a time.

    Attributes:
        lora_name: Its name.
        lora_int_id: Its id, an integer >= 1.
        lora_path: Its folder, with `adapter_config.json` and `adapter_model.safetensors` in PEFT's format.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    @property
    def cache_keys(self) -> list[tuple[str, str]]:
        """Values that enter the block hashes, so that the KV cache of different adapters is not shared."""
        return [
            ("lora_name", self.lora_name),
            ("lora_int_id", str(self.lora_int_id)),
            ("lora_path", self.lora_path),
        ]
