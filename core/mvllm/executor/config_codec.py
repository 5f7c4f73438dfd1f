"""Encodes the engine's configuration as msgpack, for the processes that the engine starts."""

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
    """`config` as msgpack for each worker, in rank order. Only rank 0 shows progress bars."""
    first, others = encode_config(config), encode_config(replace_field(config, "load.use_tqdm", False))
    return [first if rank == 0 else others for rank in range(num_workers)]


def decode_config(data: bytes) -> EngineConfig:
    """Decodes what `encode_config` returned.

    Raises:
        msgspec.ValidationError: `data` is no configuration, or one of another version of mvllm.
    """
    return _decoder.decode(data)


def _to_plain(value: Any) -> Any:
    if isinstance(value, HFConfig):
        # As JSON, like in the file: msgpack has no integers above 64 bits and no lone surrogates.
        return {"json": json.dumps(value.as_dict()), "source": value.source}
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"A {type(value).__name__} in the configuration cannot be encoded for another process.")


def _from_plain(kind: type, value: Any) -> Any:
    if kind is HFConfig:
        return HFConfig(json.loads(value["json"]), value["source"])
    if issubclass(kind, Path):
        return Path(value)
    raise TypeError(f"A {kind.__name__} in the configuration cannot be decoded from another process.")


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_decoder = msgspec.msgpack.Decoder(EngineConfig, dec_hook=_from_plain)
