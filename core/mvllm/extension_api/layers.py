"""For packages with models whose layers are built in another way than core's: what is beside the layers.

The layers themselves (`QKVLinear`, `Attention`, `RMSNorm`, ...) are names of `mvllm.extension_api`, and a model of them
does not need this module: it is for classes that shard or replace layers, as those of `mvllm-transformers-backend`.
"""

from mvllm.distributed.group_coordinator import GroupCoordinator as GroupCoordinator
from mvllm.layers.context import ShardIndex as ShardIndex
from mvllm.layers.linear import HeadShard as HeadShard
from mvllm.layers.linear import Linear as Linear
from mvllm.layers.linear import shard_slice as shard_slice
from mvllm.layers.rotary import CosSinRows as CosSinRows
from mvllm.layers.weight_target import whole_tensor_target as whole_tensor_target

__all__ = ["CosSinRows", "GroupCoordinator", "HeadShard", "Linear", "ShardIndex", "shard_slice", "whole_tensor_target"]
