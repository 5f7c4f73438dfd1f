"""Public names of the engine's arguments."""

from mvllm.config.engine_args import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
