"""Public names of the settings of a pooling request."""

from mvllm.messages.pooling_params import PoolingParams, PoolingTask, PoolingType

__all__ = ["PoolingParams", "PoolingTask", "PoolingType"]
