"""The engine's configuration as bytes, for processes that are started with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from mvllm.config.engine_config import EngineConfig, replace_field
from mvllm.config.hf_config import HFConfig


def encode_config(config: EngineConfig) -> bytes:
    """`config` as msgpack."""
    return _encoder.encode(config)


def encode_worker_configs(config: EngineConfig, num_workers: int) -> list[bytes]:
    """`config` for each worker, in rank order. Only the first shows progress bars."""
    first, others = encode_config(config), encode_config(replace_field(config, "load.use_tqdm", False))
    return [first if rank == 0 else others for rank in range(num_workers)]


def decode_config(data: bytes) -> EngineConfig:
    """What `encode_config` was given.

    Raises:
        msgspec.ValidationError: The bytes are of something else, or of another version of mvllm.
    """
    return _decoder.decode(data)


def _to_plain(value: Any) -> Any:
    if isinstance(value, HFConfig):
        # As the file has it: JSON knows integers of any size and any text, msgpack does not.
        return {"json": json.dumps(value.as_dict()), "source": value.source}
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"A {type(value).__name__} in the configuration cannot travel to another process.")


def _from_plain(kind: type, value: Any) -> Any:
    if kind is HFConfig:
        return HFConfig(json.loads(value["json"]), value["source"])
    if issubclass(kind, Path):
        return Path(value)
    raise TypeError(f"A {kind.__name__} in the configuration cannot come from another process.")


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_decoder = msgspec.msgpack.Decoder(EngineConfig, dec_hook=_from_plain)
