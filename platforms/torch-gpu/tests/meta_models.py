"""Models of real sizes on torch's meta device, with the operations and the attention of the torch-gpu platforms.

A layer of a model is like the next of its kind, so a model is built with one and with two *periods* of its layers, and
numbers of the whole are extrapolated. Nothing is computed, and no weight has memory.

A program that imports this module must run without Triton's interpreter: it replaces Triton's launches.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import mvllm_torch_gpu.ops
from mvllm.config.engine_args import EngineArgs
from mvllm.config.model import ModelConfig
from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.families.gemma4.layers import LayerScalar
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.quantization.registry import quantization_method
from mvllm.models.causal_lm import CausalLM
from mvllm.models.registry import resolve_model_class
from mvllm.ops.dtypes import torch_dtype
from mvllm.ops.registry import OpTable
from mvllm.platform.attention import AttentionBackend, AttentionSpec, BatchLayout
from mvllm.platform.communicator import Communicator
from mvllm.platform.shapes import StepKind
from mvllm.platform.state import StateArguments
from mvllm.platform.topology import GroupSpec
from mvllm_torch_gpu.attention import TritonAttention
from mvllm_torch_gpu.autotuned_linear import TRITON
from mvllm_triton import float8_weight

META = torch.device("meta")
BLOCK_SIZE = 16

MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""By name: `config`, the parts of config.json that give sizes; `tp`, the ranks of a group; `fixed`, layers that occur
once, before the others; `period`, layers after which the kinds of layers repeat; `layers`, all of them;
`like`, the model that has the rest of `config`."""


@dataclass(frozen=True)
class Device:
    """What the launchers ask an absent device.

    Attributes:
        multiprocessors: Their number.
        shared_memory: Bytes that a program may have.
        warp_size: Threads of a warp.
        has_ptx: Whether it executes PTX.
        has_tensor_memory, multiplies_from_registers: As in mvllm_triton.device.
        reads_float8: Whether it converts `float8` itself.
        multiplies_float8: Whether it multiplies `float8`.
        float8: Name of its float8 format.
    """

    multiprocessors: int
    shared_memory: int
    warp_size: int = 32
    has_ptx: bool = True
    has_tensor_memory: bool = False
    multiplies_from_registers: bool = False
    reads_float8: bool = True
    multiplies_float8: bool = True
    float8: str = "float8_e4m3fn"


H100 = Device(132, 227 << 10)


@contextmanager
def device_like(device: Device) -> Iterator[None]:
    """Launchers inside the block choose tiles for this device."""
    answers: dict[str, Callable[..., Any]] = {
        "processors": lambda _: device.multiprocessors,
        "shared_memory": lambda _: device.shared_memory,
        "warp_size": lambda _: device.warp_size,
        "has_tensor_memory": lambda _: device.has_tensor_memory,
        "multiplies_from_registers": lambda _: device.multiplies_from_registers,
        "has_ptx": lambda _, dtype: device.has_ptx and dtype == torch.bfloat16,
        "reads_float8": lambda _, float8: device.reads_float8 and str(float8) == f"torch.{device.float8}",
    }
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("mvllm_triton.") and name != "mvllm_triton.device":
                for function, answer in answers.items():
                    if hasattr(module, function):
                        stack.enter_context(mock.patch.object(module, function, answer))
        yield


class MetaCommunicator(Communicator):
    """Collectives of a group whose other ranks do not exist; `calls` has the name and the bytes of each."""

    on_host = True

    def __init__(self, world_size: int) -> None:
        self.rank, self.world_size = 0, world_size
        self.calls: list[tuple[str, int]] = []

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append(("all_reduce", tensor.nbytes))
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self.calls.append(("all_gather", tensor.nbytes * self.world_size))
        sizes = list(tensor.shape)
        sizes[dim] *= self.world_size
        with torch.utils._python_dispatch._disable_current_modes():
            return torch.empty(sizes, dtype=tensor.dtype, device=META)

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        raise AssertionError("no other rank exists")

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        raise AssertionError("no other rank exists")


@dataclass
class MetaModel:
    """A built model.

    Attributes:
        model: It, with prepared weights and caches of one block and one slot.
        backends: By `metadata_key`: the attention of its layers.
        ops: Its operations.
        communicator: The collectives of its group; None for a group of one rank.
    """

    model: CausalLM
    backends: Mapping[Hashable, AttentionBackend]
    ops: OpTable
    communicator: MetaCommunicator | None

    def run(self, num_requests: int, query_len: int, seq_len: int) -> torch.Tensor:
        """A greedy step in which each request computes the last `query_len` of its `seq_len` tokens: [num_requests]."""
        arguments = step_arguments(num_requests, query_len, seq_len, self.backends)
        hidden = self.model(*arguments)
        last = hidden if query_len == 1 else hidden[:num_requests]
        logits = self.model.compute_logits(last)
        found: torch.Tensor = self.ops.get("argmax", hidden.dtype, size=logits.shape[1]).function(logits)
        return found


def build(name: str, num_layers: int, device: Device = H100, kv_dtype: str | None = None) -> MetaModel:
    """A model of MODELS with this number of layers. Call it within `device_like`.

    Args:
        kv_dtype: Storage dtype of the KV cache; None for the compute dtype.
    """
    return build_config(_config(name, num_layers), int(MODELS[name].get("tp", 1)), device, kv_dtype)


def build_config(config: ModelConfig, tp: int, device: Device, kv_dtype: str | None = None) -> MetaModel:
    """A model of any config, one of `tp` ranks. Call it within `device_like`. For `kv_dtype` see `build`."""
    communicator = MetaCommunicator(tp) if tp > 1 else None
    backends: dict[AttentionSpec, AttentionBackend] = {}

    def attention(spec: AttentionSpec) -> AttentionBackend:
        if spec not in backends:
            assert not TritonAttention.validate(spec), spec
            backends[spec] = TritonAttention(spec, float8=device.float8)
        return backends[spec]

    providers = mvllm_torch_gpu.ops.providers(device.float8, multiplies_float8=device.multiplies_float8, linear=TRITON)
    ops = OpTable.resolve(providers)
    context = BuildContext(
        dtype=torch_dtype(config.dtype),
        device=META,
        ops=ops,
        attention=attention,
        tp=GroupCoordinator(GroupSpec(name="tp", ranks=tuple(range(tp)), rank=0), communicator),
        pp=GroupCoordinator.single("pp"),
        kv_dtype=kv_dtype or config.dtype,
        quantization=quantization_method(config),
    )
    model = resolve_model_class(config.architecture, config.model_impl, config.language_architecture)(config, context)
    model.weight_targets()
    without_values = (
        mock.patch.object(float8_weight, "_with_nan", lambda codes, scales, block: scales),
        mock.patch.object(LayerScalar, "prepare_weights", lambda layer: setattr(layer, "factor", 0.5)),
    )
    with without_values[0], without_values[1]:
        model.after_load()
    model.eval()
    for layer in model.attention_layers():
        layer.kv_cache = layer.backend.allocate(1, BLOCK_SIZE, META)
    for state in model.state_layers():
        state.state = state.backend.allocate(1, META)
    keys = {layer.metadata_key: layer.backend for layer in model.attention_layers()}
    return MetaModel(model, keys, ops, communicator)


def step_arguments(
    num_requests: int, query_len: int, seq_len: int, backends: Mapping[Hashable, AttentionBackend]
) -> tuple[torch.Tensor, torch.Tensor, ForwardStep]:
    """Token ids, positions and metadata of a step, on the meta device."""
    num_tokens, pages = num_requests * query_len, -(-seq_len // BLOCK_SIZE)
    shapes = {
        "query_start_loc": (num_requests + 1,),
        "seq_lens": (num_requests,),
        "block_table": (num_requests, pages),
        "slot_mapping": (num_tokens,),
    }
    host = {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}
    host["query_start_loc"] += np.arange(num_requests + 1, dtype=np.int32) * query_len
    host["seq_lens"] += np.int32(seq_len)
    on_device = {f"{key}_device": _integers(*shape) for key, shape in shapes.items()}
    layout = BatchLayout(
        num_requests=num_requests,
        num_tokens=num_tokens,
        max_query_len=query_len,
        max_seq_len=seq_len,
        block_size=BLOCK_SIZE,
        kind=StepKind.DECODE if query_len == 1 else StepKind.MIXED,
        num_decodes=num_requests if query_len == 1 else 0,
        **host,
        **on_device,
    )
    metadata = {key: backend.build_metadata(layout) for key, backend in backends.items()}
    slots = _integers(num_requests), _integers(num_requests)
    states = StateArguments(on_device["query_start_loc_device"], *slots, query_len)
    return _integers(num_tokens), _integers(num_tokens), ForwardStep(metadata, state_metadata=states)


@cache
def _config(name: str, num_layers: int) -> ModelConfig:
    spec = MODELS[name]
    return read_config({**MODELS[spec.get("like", name)]["config"], **spec["config"], "num_hidden_layers": num_layers})


def read_config(values: Mapping[str, Any]) -> ModelConfig:
    """The config of a checkpoint whose config.json has these values; computed in bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(values), encoding="utf-8")
        args = EngineArgs(model=folder, skip_tokenizer_init=True, dtype="bfloat16")
        config = args.create_engine_config().model
    return dataclasses.replace(config, dtype="bfloat16")


def _integers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)
