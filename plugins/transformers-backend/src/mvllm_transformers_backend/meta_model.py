"""MetaModel: a transformers model on the meta device, checked before any weight is read."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mvllm.extension_api import ConfigError, ModelConfig, ModelError, MvllmError, get_logger
from mvllm.extension_api.layers import GroupCoordinator, ShardIndex, shard_slice
from mvllm.extension_api.model_implementations import is_native
from mvllm_transformers_backend.dry_run import (
    NAME,
    AttentionParameters,
    CrossTokenOpDetector,
    DryRun,
    UnsupportedModelError,
    register_attention,
)
from mvllm_transformers_backend.replacement_modules import (
    CallDetector,
    ModuleCalled,
    PrecomputedHiddenStates,
    RecordingLinear,
)
from mvllm_transformers_backend.supported_classes import model_class
from mvllm_transformers_backend.tp_plan import ParallelStyle, TPPlan
from mvllm_transformers_backend.weight_conversion import CheckpointNameMap

# Settings that do not describe the model: storage, implementation, and return values.
_NOT_MODEL_SETTINGS = (
    "architectures",
    "auto_map",
    "quantization_config",
    "compression_config",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
    "gradient_checkpointing",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "use_cache",
)
_NUMBERS_OF_TOKENS = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061, 1063, 1069)  # primes

logger = get_logger("mvllm.transformers_backend.meta_model")

_building = threading.Lock()
"""Held while transformers builds a model, since it changes process-wide defaults."""


class MetaModel:
    """A transformers model without weights, split into layers and head, with recording linear layers.

    Args:
        config: The checkpoint.
        dtype: Compute dtype.
        tp: The ranks that share each layer.

    Attributes:
        causal: The language model, with `precomputed` in place of what its head reads.
        precomputed: Returns the hidden states that the head reads.
        layers: The removed layers: everything up to the last hidden state.
        layers_name: Their module name.
        cuts: The tensor-parallel plan.
        head_name, embedding_name: Names of the language-model head and of the token embedding.
        is_tied: Whether the two share their weight.
        lacks_head: Whether the checkpoint has no head, so that the model makes embeddings only.
        renaming: Maps checkpoint names to the model's names.
        attention: Parameters of the attention modules.

    Raises:
        ModelError: It cannot be built, or uses an operation that a paged KV cache does not support.
        ConfigError: It does not support this tensor_parallel_size, or this max_model_len.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, tp: GroupCoordinator) -> None:
        self._config, self._tp = config, tp
        self.lacks_head = config.kind.lacks_head
        self._shares = [ShardIndex(tp.rank_in_group, tp.world_size)]
        self._where = f"{config.hf_config.source}: {config.architecture}, run through transformers,"
        chosen = model_class(config.architecture)
        register_attention()
        with _building:
            self.causal = self._built(chosen, dtype)
            self._split()
            self._check_modules()
            self._check_rope()
            self.renaming = self._renaming()
            self.cuts = self._cuts()
            self._replace_linear()
            self.attention = self._run_dry()

    def refusal(self, reason: str) -> ModelError:
        """The error for an unsupported model."""
        remedy = "Take an architecture that is supported natively."
        if is_native(self._config.architecture):
            remedy = "Use model_impl='auto', with which the native class runs it."
        return ModelError(f"{self._where} is not supported: {reason}. {remedy}")

    def _config_values(self) -> dict[str, Any]:
        """The values of config.json for transformers' config class."""
        return self._config.hf_config.as_dict()

    def _attention_setting(self, config: Any) -> str | dict[str, str]:
        """`attn_implementation` of the model, or of parts of its config."""
        return NAME

    def _language_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules that compute tokens of text, by name."""
        yield from self.causal.named_modules()

    def _built(self, chosen: Any, dtype: torch.dtype) -> Any:
        values = self._config_values()
        for key in _NOT_MODEL_SETTINGS:
            values.pop(key, None)
        try:
            with torch.device("meta"):
                config = chosen.config_class.from_dict(values)
                attention = self._attention_setting(config)
                built = chosen._from_config(config, attn_implementation=attention, dtype=dtype)
        except Exception as e:
            raise ModelError(f"{self._where} cannot be built: {type(e).__name__}: {e}") from e
        return built.eval()

    def _check_modules(self) -> None:
        for name, module in self._language_modules():
            if isinstance(module, nn.RNNBase | nn.modules.conv._ConvNd):
                raise self.refusal(f"{name} is a {type(module).__name__}, which keeps more than keys and values")
        for name, module in self.causal.named_modules():
            loose = [key for key, value in vars(module).items() if isinstance(value, torch.Tensor) and value.is_meta]
            if loose:
                raise self.refusal(f"{name} keeps a tensor ({', '.join(loose)}) that is neither weight nor buffer")

    def _check_rope(self) -> None:
        for module, rope_type in _scaled_ropes(module for _, module in self._language_modules()):
            native = _native_len(getattr(module, "config", self.causal.config), rope_type)
            if self._config.max_model_len > native:
                raise ConfigError(
                    f"{self._where} rotates all tokens of a step by the longest sequence in it, by its RoPE scaling "
                    f"{rope_type!r}. Set max_model_len to {native} (it is {self._config.max_model_len}), up to which "
                    "every sequence rotates alike."
                )

    def _renaming(self) -> CheckpointNameMap:
        renaming = CheckpointNameMap.from_model(self.causal)
        try:
            for name, parameter in self.causal.named_parameters():
                renaming.pieces(name, tuple(parameter.shape))
        except ValueError as e:
            raise self.refusal(str(e)) from e
        return renaming

    def _split(self) -> None:
        causal = self.causal
        head, embedding = causal.get_output_embeddings(), causal.get_input_embeddings()
        self._read_by_head = self._find_layers()
        self.layers_name = self._find_language_model()
        if not self.layers_name or not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding):
            raise self.refusal("its layers, embedding and head cannot be told apart")
        self.layers: nn.Module = causal.get_submodule(self.layers_name)
        names = {id(module): name for name, module in causal.named_modules()}
        self.head_name, self.embedding_name = names[id(head)], names[id(embedding)]
        if self.head_name.startswith(f"{self._read_by_head}."):
            raise self.refusal("its head is a part of its layers")
        self.is_tied = head.weight is embedding.weight

    def _find_language_model(self) -> str:
        """Name of the layers within the module that the head reads."""
        return self._read_by_head

    def _find_layers(self) -> str:
        """Name of the module that computes the hidden states: the one that the language model's forward calls.

        Usually it is the base model; some models call a part of it, for instance `model.decoder`.
        """
        causal, prefix = self.causal, self.causal.base_model_prefix
        base = causal._modules.get(prefix)
        if base is None:
            return ""
        causal._modules[prefix] = CallDetector(base, prefix)
        try:
            with torch.inference_mode():
                causal(input_ids=torch.zeros((1, 1), dtype=torch.int32, device="meta"), use_cache=False)
        except ModuleCalled as called:
            return called.name
        except Exception as e:  # noqa: BLE001  (the dry run reports it)
            logger.debug("%s: the head does not call its layers: %s: %s", self._where, type(e).__name__, e)
        finally:
            causal._modules[prefix] = base
        return str(prefix)

    def _cuts(self) -> TPPlan:
        """The tensor-parallel plan of the layers; core's own head shards itself."""
        plan = getattr(self.causal, "_tp_plan", None) or {}
        layers = {name: style for name, style in plan.items() if name.startswith(f"{self.layers_name}.")}
        return TPPlan(layers, self._tp.world_size, self._config.architecture)

    def _replace_linear(self) -> None:
        for name, module in list(self._language_modules()):
            if type(module) is nn.Linear and name != self.head_name:
                set_module(self.causal, name, self._dry_linear(name, module))
        for module_name, module in self._language_modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                cut = self.cuts.style_of(f"{module_name}.{name}" if module_name else name)
                if cut is ParallelStyle.COLWISE and parameter.dim() == 1:
                    size = parameter.shape[0] // self._tp.world_size
                    setattr(module, name, nn.Parameter(parameter.new_empty(size), requires_grad=False))
                elif cut is not ParallelStyle.REPLICATED:
                    raise ConfigError(
                        f"{self._where} cannot be shared by {self._tp.world_size} ranks: {module_name}.{name} is no "
                        "linear layer. Use tensor_parallel_size=1."
                    )

    def _dry_linear(self, name: str, linear: nn.Linear) -> RecordingLinear:
        cut, in_width, out_width = self.cuts.style_of(name), linear.in_features, linear.out_features
        if cut in (ParallelStyle.COLWISE, ParallelStyle.COLWISE_GATHERED):
            band = shard_slice(out_width, self._shares, f"output features of {name}")
            out_width = out_width if cut is ParallelStyle.COLWISE_GATHERED else band.stop - band.start
        elif cut in (ParallelStyle.ROWWISE, ParallelStyle.ROWWISE_SPLIT_INPUT):
            band = shard_slice(in_width, self._shares, f"input features of {name}")
            in_width = in_width if cut is ParallelStyle.ROWWISE_SPLIT_INPUT else band.stop - band.start
        return RecordingLinear(linear, in_width, out_width)

    def _run_dry(self) -> dict[nn.Module, AttentionParameters]:
        taken = {size for p in self.causal.parameters() for size in p.shape} | {self._config.max_model_len}
        num_tokens = next(number for number in _NUMBERS_OF_TOKENS if number not in taken)
        run = DryRun(num_tokens, self._config.max_model_len)
        inputs = torch.zeros((1, num_tokens), dtype=torch.int32, device="meta")
        positions = torch.zeros((1, num_tokens), dtype=torch.int32, device="meta")
        detector = CrossTokenOpDetector(num_tokens, positions)
        try:
            with torch.inference_mode(), run.active(self.layers.config), _plain_rope(self.layers):
                ones = torch.ones((1, num_tokens), dtype=torch.bool, device="meta")
                with detector:
                    hidden = self.layers(
                        input_ids=inputs, position_ids=positions, attention_mask=ones, use_cache=False
                    ).last_hidden_state
                self.precomputed = PrecomputedHiddenStates()
                set_module(self.causal, self._read_by_head, self.precomputed)
                self.precomputed.hidden = hidden
                logits = self.causal(input_ids=inputs, attention_mask=ones, use_cache=False).logits
        except UnsupportedModelError as e:
            raise self._unsupported(str(e)) from e
        except MvllmError:
            raise
        except Exception as e:
            if "meta tensor" in str(e):  # torch's message for reading data of a meta tensor
                raise self._unsupported(
                    "what it computes depends on the values of its tensors, not shapes alone"
                ) from e
            raise self._unsupported(f"a run without data fails ({type(e).__name__}: {e})") from e
        width = self.causal.get_submodule(self.head_name).in_features
        if tuple(hidden.shape) != (1, num_tokens, width) or logits.shape[:2] != (1, num_tokens):
            raise self.refusal("its results have unexpected shapes")
        if len(run.attention) != self._config.num_layers:
            found, expected = len(run.attention), self._config.num_layers
            raise self.refusal(f"{found} of its {expected} layers call transformers' attention interface")
        if not detector.reads_positions:
            raise self.refusal("it does not use the positions that it is given")
        return run.attention

    def _unsupported(self, reason: str) -> MvllmError:
        ranks = self._tp.world_size
        if ranks == 1:
            return self.refusal(reason)
        return ConfigError(
            f"{self._where} cannot be shared by {ranks} ranks: {reason}. Use tensor_parallel_size=1, with "
            "data_parallel_size for more devices."
        )


def set_module(root: nn.Module, name: str, module: nn.Module) -> None:
    """Replaces the submodule of that name."""
    parent, _, attribute = name.rpartition(".")
    root.get_submodule(parent)._modules[attribute] = module


def _scaled_ropes(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Modules whose RoPE scaling depends on the longest sequence of a call, and the scaling."""
    for module in modules:
        types = getattr(module, "rope_type", None)
        for rope_type in types.values() if isinstance(types, dict) else (types,):
            if isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope"):
                yield module, rope_type


def _native_len(config: Any, rope_type: str) -> int:
    """The length up to which the scaling does not depend on the sequence length."""
    if rope_type == "longrope":
        settings = getattr(config, "rope_parameters", None) or {}
        nested = [value for value in settings.values() if isinstance(value, dict)]
        originals = [one.get("original_max_position_embeddings") for one in (settings, *nested)]
        found = [length for length in originals if length]
        if found:
            return int(min(found))
    return int(config.max_position_embeddings)


@contextmanager
def _plain_rope(layers: nn.Module) -> Iterator[None]:
    """Disables length-dependent RoPE scalings inside the context, since they read positions, which have no data."""
    scaled = {module: module.rope_type for module, _ in _scaled_ropes(layers.modules())}
    for module, types in scaled.items():
        plain = dict.fromkeys(types, "default") if isinstance(types, dict) else "default"
        module.rope_type = plain  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, types in scaled.items():
            module.rope_type = types
