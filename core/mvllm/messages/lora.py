"""Which LoRA adapter a request wants, as callers name it."""

from __future__ import annotations

import msgspec


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter: small matrices that are added to the model's own, trained for one purpose.

    All three fields together name it. Under an id an engine knows one adapter at a time.

    Attributes:
        lora_name: What it is called.
        lora_int_id: Its number, from 1 on.
        lora_path: Its folder, with `adapter_config.json` and `adapter_model.safetensors` as PEFT writes them.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    @property
    def cache_keys(self) -> list[tuple[str, str]]:
        """What tells its keys and values from those of other adapters, and of the model itself."""
        return [
            ("lora_name", self.lora_name),
            ("lora_int_id", str(self.lora_int_id)),
            ("lora_path", self.lora_path),
        ]
