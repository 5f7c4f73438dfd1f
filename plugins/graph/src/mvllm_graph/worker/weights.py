"""Loads and updates the weights of models that run as graphs, a module at a time.

The program that takes the weights is compiled from a trace, and a trace needs no values. So there are two models of the
same class and configuration, as for updates of other models (models/weight_update.py):

    model without weights   its parameters have untouched memory; it is prepared, traced, and kept for its structure
    empty model             its parameters get memory when a tensor arrives; a module that has all of its tensors is
                            prepared, its arrays are given to the program, and their memory is freed

A first load and an update are the same. At most a few modules are in memory beside the program's own copy. Where the
preparation of a module decides more than its arrays by their values, as a number that is read from a tensor, the model
has to be loaded before it is traced; see ValuesInStructure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from mvllm.extension_api import BuildContext, CausalLM, LMHead, ModelError, VocabEmbedding
from mvllm.extension_api.models import ModelWeightUpdate, allocate, drop_attributes, load_weights, same_structure
from mvllm.plugin_api import LoadConfig, ModelConfig
from mvllm_graph.trace import tensors_in

_SMALL_BYTES = 1 << 20
"""Parameters below this size are filled with NaN, which shows where a value is made from them."""

Give = Callable[[str, torch.Tensor], None]
"""Gives an array to the program, by its name in the graphs."""


class ValuesInStructure(ModelError):
    """A model's structure depends on the values of its weights; the message says where."""


class WeightlessContext(BuildContext):
    """A build context whose parameters have memory that is not used as long as nothing writes to it."""

    def parameter(self, *shape: int) -> nn.Parameter:
        parameter = super().parameter(*shape)
        if parameter.is_floating_point() and parameter.itemsize > 1 and parameter.nbytes < _SMALL_BYTES:
            parameter.data.fill_(math.nan)
        return parameter


def prepare_without_weights(model: CausalLM) -> None:
    """Prepares all modules of a model that was built with a WeightlessContext.

    Raises:
        ValuesInStructure: A preparation fails without values.
    """
    targets = model.weight_targets()
    modules = model.unprepared_modules()
    try:
        with torch.no_grad():
            for name in targets:
                model.tensor_loaded(name)
                for module in [module for module, names in modules.items() if name in names]:
                    _release(module)
            model.after_load()
    except (RuntimeError, ValueError, ArithmeticError, IndexError) as e:
        raise ValuesInStructure(f"{type(model).__name__} cannot be prepared without weights: {e}") from e


def _release(module: nn.Module) -> None:
    """Gives back what a preparation has written, and keeps shapes and strides."""
    for _, tensor, _ in (each for name, value in _own(module).items() for each in tensors_in(name, value)):
        if tensor.nbytes >= _SMALL_BYTES and tensor.untyped_storage().nbytes() >= tensor.nbytes:
            tensor.data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _own(module: nn.Module) -> dict[str, Any]:
    return {**module._parameters, **{k: v for k, v in vars(module).items() if k not in ("_parameters", "_modules")}}


class GraphWeightUpdate(ModelWeightUpdate):
    """Gives the arrays of each module to the program as soon as all of its tensors are there.

    Args:
        model: The traced model.
        make_empty: As for ModelWeightUpdate.
        arrays: The tensors of `model` that graphs read, by their names.
        give: Gives an array to the program.
    """

    def __init__(
        self, model: CausalLM, make_empty: Callable[[], CausalLM], arrays: Mapping[str, torch.Tensor], give: Give
    ) -> None:
        super().__init__(model, make_empty)
        self._arrays, self._give = arrays, give
        self._ids = {id(tensor) for tensor in arrays.values()}
        self._paths = {module: path for path, module in self._new.named_modules()}
        self._given: set[str] = set()
        self._from_checkpoint = {
            id(tensor)
            for module in self._units
            for name, value in _own(self._live[module]).items()
            for _, tensor, _ in tensors_in(name, value)
        }

    def load_all(self, config: ModelConfig, load: LoadConfig) -> None:
        """Loads the checkpoint of the model.

        Raises:
            ModelError: As `load_weights`.
            ValuesInStructure: The model has to be loaded before it is traced. Some arrays may have been given.
        """
        load_weights(
            self._new,
            config.path,
            load_format=load.load_format,
            use_tqdm=load.use_tqdm,
            seed=config.weights_seed,
            on_loaded=self.arrived,
            allocate=allocate,
        )
        self.finish()
        for name, tensor in self._arrays.items():
            if name not in self._given:
                self._give_constant(name, tensor)

    def finish(self) -> None:
        if self._embedding_changed:
            for head in self._heads_to_make():
                head.prepare_weights()
                self._write(head)
        for module in self._new.modules():
            if isinstance(module, VocabEmbedding):
                drop_attributes(module, ["weight"])

    def _modules_to_write(self, new: CausalLM) -> Mapping[nn.Module, frozenset[str]]:
        """Also those that need no preparation."""
        found = {}
        for module in new.modules():
            if module is not new and (targets := getattr(module, "weight_targets", None)) is not None:
                found[module] = frozenset(name for name, _ in targets())
        return {module: names for module, names in found.items() if names}

    def _parameters_written_directly(self, model: CausalLM) -> dict[nn.Parameter, nn.Parameter]:
        """None: the loaded model's parameters have no memory."""
        return {}

    def _heads_to_make(self) -> list[LMHead]:
        """Tied heads in another form than the embedding."""
        return [
            head
            for head in self._new.modules()
            if isinstance(head, LMHead)
            and head.is_made_from_embedding
            and head.weight is not None
            and not isinstance(self._live[head].weight, nn.Parameter)  # the embedding's own
        ]

    def _write_module(self, module: nn.Module) -> None:
        live, path = self._live[module], self._paths[module]
        written = self._prepared_attributes(module)
        for name, value in written.items():
            if not same_structure(getattr(live, name, None), value):
                raise ValuesInStructure(f"{path}.{name} has another structure than without its values.")
            self._write_attribute(live, path, name, value)
        kept = ["weight"] if isinstance(module, VocabEmbedding) and self._heads_to_make() else []
        drop_attributes(module, [name for name in written if name not in kept])

    def _write_attribute(self, live: nn.Module, path: str, name: str, value: Any) -> None:
        """Gives arrays of graphs to the program; the loaded model keeps others, which the host may read."""
        found = list(tensors_in(f"{path}.{name}", value))
        for array, tensor, _ in found:
            if array in self._arrays:
                self._given.add(array)
                self._give(array, tensor)
                release(self._arrays[array])
        own = [tensor for _, tensor, _ in tensors_in(name, getattr(live, name, None))]
        if found and not any(id(tensor) in self._ids for tensor in own):
            self._replace(live, name, value)

    def _give_constant(self, name: str, tensor: torch.Tensor) -> None:
        """An array that no tensor of the checkpoint fills, such as a table of angles."""
        is_float = tensor.is_floating_point() and tensor.itemsize > 1
        if id(tensor) in self._from_checkpoint or (is_float and bool(tensor.isnan().any())):
            raise ValuesInStructure(f"{name} is made from weights of another module.")
        self._give(name, tensor)
        release(tensor)


def release(tensor: torch.Tensor) -> None:
    """Frees a tensor's memory. What still reads its shape finds it."""
    tensor.data = tensor.new_empty(1).expand(tensor.shape)


def weightless_model(model_class: type[CausalLM], config: ModelConfig, context: BuildContext) -> CausalLM:
    """A model that can be traced, without weights.

    Raises:
        ValuesInStructure: It has to be loaded first.
    """
    model = model_class(config, WeightlessContext.of(context))
    prepare_without_weights(model)
    model.eval()
    return model
