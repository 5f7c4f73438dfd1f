"""Updates the weights of a loaded model in place, through the loader of its checkpoint.

A second, empty model of the same class lists the targets of each checkpoint tensor, as at the start. Its parameters
have no memory until a tensor arrives. When all tensors of a module have arrived, the module prepares its weights
(packs, quantizes, absorbs), the result is copied over the weights of the loaded model, and its memory is freed:

    checkpoint tensors ──> module of the empty model ──prepare──> result ──copy──> module of the loaded model

So sharding, fusing, packing and quantization are those of the start, and at most a few modules are in memory twice. A
parameter that is used as it is loaded is written directly, without a copy; there, a part of a module's tensors
suffices. Tensors keep their storage, so captured steps stay valid. Where a provider's form of a weight has no tensor
of equal size to write to, the object is replaced, and `storage_replaced` says so.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mvllm.checkpoint_formats.tensor_entry import TensorEntry, packed_name
from mvllm.errors import RequestError
from mvllm.layers.context import BuildContext
from mvllm.layers.embedding import LMHead, VocabEmbedding
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.linear import Linear
from mvllm.layers.quantization.quantized_matrix import QuantizedMatrix
from mvllm.layers.weight_target import WeightTarget
from mvllm.models.causal_lm import CausalLM
from mvllm.models.weight_loader import check_tensors, match_names, targets_as_stored

_SHOWN_NAMES = 5
_OF_HEAD = "draft head: "

_WRITTEN_DIRECTLY: dict[type[nn.Module], tuple[str, ...]] = {
    Linear: ("weight",),
    LMHead: ("weight",),
    VocabEmbedding: ("weight",),
    FusedMoE: ("gate_up", "down"),
}
"""Modules whose `prepare_weights` leaves these weights as they are if they are parameters afterwards."""

CopyTensor = Callable[[TensorEntry, WeightTarget], None]
"""Copies the part of a checkpoint tensor that a target names."""


class UnallocatedContext(BuildContext):
    """A build context whose parameters have no memory until `allocate`."""

    def parameter(self, *shape: int) -> nn.Parameter:
        parameter = super().parameter(*shape)
        with suppress(RuntimeError, NotImplementedError):  # devices whose storage has a fixed size keep the memory
            parameter.untyped_storage().resize_(0)
        return parameter


def allocate(tensor: torch.Tensor) -> None:
    """Gives a parameter of an UnallocatedContext its memory, filled with zeros. Views of it share the memory."""
    storage = tensor.untyped_storage()
    if storage.nbytes() < tensor.numel() * tensor.itemsize:
        storage.resize_(tensor.numel() * tensor.itemsize)
        with torch.no_grad():
            tensor.zero_()


@dataclass
class _Unit:
    """A module that is prepared when all of its tensors are loaded.

    Attributes:
        module: The module of the empty model.
        names: Its checkpoint tensors.
        missing: Those that are not loaded yet.
    """

    module: nn.Module
    names: frozenset[str]
    missing: set[str]


class ModelWeightUpdate:
    """The update of one model, from its first tensor to `finish`.

    Args:
        model: The loaded model.
        make_empty: Builds a model of the same class and configuration with an UnallocatedContext.

    Attributes:
        storage_replaced: Whether a weight could not be written in place. Captured steps that used it are invalid.
    """

    def __init__(self, model: CausalLM, make_empty: Callable[[], CausalLM]) -> None:
        self._loaded: set[str] = set()
        self.storage_replaced = False
        self._new = new = make_empty()
        live = dict(model.named_modules())
        self._live = {module: live[name] for name, module in new.named_modules() if name in live}
        self._targets = dict(new.weight_targets())
        self._complete: set[str] = set()
        self._units = {
            module: _Unit(module, names, set(names)) for module, names in self._modules_to_write(new).items()
        }
        self._as_built = {
            module: _attributes(module)
            for module in new.modules()
            if module in self._units or isinstance(module, LMHead | VocabEmbedding)
        }
        direct = self._parameters_written_directly(model)
        for name, targets in self._targets.items():
            self._targets[name] = [
                replace(target, parameter=direct.get(target.parameter, target.parameter)) for target in targets
            ]
        self._embedding_names = self._names_of_embeddings()
        self._embedding_changed = False

    def check(self, found: Mapping[str, TensorEntry], where: Path, *, whole: bool) -> dict[str, TensorEntry]:
        """The entries by the model's names, without those that this rank does not use. Changes nothing.

        Args:
            found: The tensors of an update.
            where: Their folder or file, for messages.
            whole: Whether they must be all tensors of the model.

        Raises:
            ModelError: A tensor is unknown, has a wrong shape or dtype, or one is missing.
            RequestError: A tensor was loaded before in this update, and its module is complete.
        """
        floats = [
            name
            for name in found
            if (packed := packed_name(self._new.given_name(name))) in self._targets
            and name not in self._targets
            and packed not in found
        ]
        if floats:
            raise RequestError(
                f"{_listed(floats)}: the engine keeps these matrices in the blocks of a GGUF file, and takes no floats "
                "for them. Update them from a GGUF file of the same types, or start the engine from floats."
            )
        matched = match_names(found, self._new, self._targets, where, allow_missing=not whole)
        again = sorted(matched.keys() & self._complete)
        if again:
            raise RequestError(
                f"This update has already loaded {_listed(again)}. Finish it, and send them in another update."
            )
        targets = {name: self._targets_of(name, entry) for name, entry in matched.items()}
        check_tensors(matched, targets, getattr(self._new.config, "vocab_size", None))
        return matched

    def is_packed(self, name: str) -> bool:
        """Whether the model takes a tensor of this name in blocks, as GGUF files store it."""
        return packed_name(name) in self._targets

    def load(self, name: str, entry: TensorEntry, copy: CopyTensor) -> None:
        """Loads one tensor of the result of `check`, and writes the modules that it completes."""
        for target in self._targets_of(name, entry):
            allocate(target.parameter)
            copy(entry, target)
        self.arrived(name)

    def arrived(self, name: str) -> None:
        """The targets of a tensor are filled: writes the modules that it completes."""
        self._loaded.add(name)
        self._embedding_changed |= name in self._embedding_names
        units = [unit for unit in self._units.values() if name in unit.missing]
        if units:
            self._new.tensor_loaded(name)
        for unit in units:
            unit.missing.discard(name)
            if not unit.missing:
                self._complete |= unit.names
                self._targets.update((each, []) for each in unit.names)  # frees the memory of its parameters
                del self._units[unit.module]
                self._write(unit.module)

    def check_complete(self, *, whole: bool = False, upcoming: Collection[str] = ()) -> None:
        """Raises RequestError if a module has got some of its tensors and needs others. Changes nothing.

        Args:
            whole: Every tensor of the model is needed.
            upcoming: Tensors that will be loaded.
        """
        if whole and (absent := sorted(self._targets.keys() - self._loaded)):
            raise RequestError(
                f"The update lacks {_listed(absent)}. An earlier update has failed, so this one must have every "
                "weight of the model. Send the others, then finish the update."
            )
        lacking: set[str] = set()
        for unit in self._units.values():
            missing = unit.missing.difference(upcoming)
            if len(missing) < len(unit.names):
                lacking |= missing
        if lacking:
            raise RequestError(
                f"The update lacks {_listed(sorted(lacking))}. Other tensors of the same modules were sent, and here a "
                "module's weights are stored together in another form. Send these tensors too, then finish the update."
            )

    def finish(self) -> None:
        """Writes the weights that are derived from other modules' weights. Call it once, after `check_complete`."""
        if self._embedding_changed:
            self._write_heads_made_from_embeddings()

    # --- parts

    def _modules_to_write(self, new: CausalLM) -> Mapping[nn.Module, frozenset[str]]:
        """The modules of the empty model that are written when all of their tensors are loaded, and these tensors."""
        return new.unprepared_modules()

    def _targets_of(self, name: str, entry: TensorEntry) -> list[WeightTarget]:
        return targets_as_stored(entry, self._targets[name])

    def _parameters_written_directly(self, model: CausalLM) -> dict[nn.Parameter, nn.Parameter]:
        """The loaded model's parameter for each one of the empty model that needs no preparation.

        Removes the modules of these parameters from the units.
        """
        for module in list(self._units):
            names = next((names for kind, names in _WRITTEN_DIRECTLY.items() if isinstance(module, kind)), ())
            are_parameters = [module._parameters.get(name) is not None for name in names]
            if isinstance(module, Linear) and not module.keeps_rows:
                continue
            if names and all(are_parameters) and _same_parameters(module, self._live[module]):
                del self._units[module]
        loaded = dict(model.named_parameters(remove_duplicate=False))
        direct = {}
        for module_name, module in self._new.named_modules():
            if module in self._units:
                continue
            for name, parameter in module.named_parameters(module_name, recurse=False):
                found = loaded.get(name)
                if found is not None and _is_like(found, parameter):
                    direct[parameter] = found
        return direct

    def _names_of_embeddings(self) -> set[str]:
        modules = [module for module in self._new.modules() if isinstance(module, VocabEmbedding)]
        return {f"{part.name}.weight" for module in modules for part in module.layout.parts}

    def _write(self, module: nn.Module) -> None:
        """Copies a prepared module to the loaded model, with modules that share its weight; drops the copies."""
        embedding = module if isinstance(module, VocabEmbedding) else self._embedding_that_shares(module)
        if embedding is None:
            self._write_module(module)
            return
        if embedding is not module:
            embedding.prepare_weights()  # prepares the head, too
        for shared in (*embedding.shared_by, embedding):
            self._write_module(shared)

    def _embedding_that_shares(self, module: nn.Module) -> VocabEmbedding | None:
        embeddings = (each for each in self._new.modules() if isinstance(each, VocabEmbedding))
        return next((each for each in embeddings if any(head is module for head in each.shared_by)), None)

    def _write_module(self, module: nn.Module) -> None:
        live, written = self._live[module], self._prepared_attributes(module)
        for name, value in written.items():
            if not write_in_place(getattr(live, name, None), value):
                self.storage_replaced = True
                self._replace(live, name, value)
        drop_attributes(module, written)

    def _prepared_attributes(self, module: nn.Module) -> dict[str, Any]:
        """The tensors of a prepared module, and what else its preparation has changed. Call it once."""
        built = self._as_built.pop(module)
        return {
            name: value
            for name, value in _attributes(module).items()
            if isinstance(value, torch.Tensor) or value is not built.get(name)
        }

    def _replace(self, live: nn.Module, name: str, value: Any) -> None:
        if name == "_linear" and isinstance(live, Linear):
            live.replace_linear_op(value)
            return
        if name in live._parameters and not isinstance(value, nn.Parameter):
            delattr(live, name)
        setattr(live, name, value)

    def _write_heads_made_from_embeddings(self) -> None:
        """A tied head in another form than the embedding, which stays as it is loaded: quantized, for example."""
        heads = [
            module for module in self._new.modules() if isinstance(module, LMHead) and module.is_made_from_embedding
        ]
        for head in heads:
            if isinstance(self._live[head].weight, nn.Parameter):  # the embedding's own
                continue
            for module in self._new.modules():
                if isinstance(module, VocabEmbedding) and isinstance(module.weight, nn.Parameter):
                    allocate(module.weight)
                    module.weight.data.copy_(self._live[module].weight.data)
            head.prepare_weights()
            self._write(head)


class WeightUpdateWithHead:
    """The update of a model and of a draft head whose weights are in the same checkpoint.

    It is used as a ModelWeightUpdate. The names of the head's tensors get a prefix, because both may have targets for
    the same tensor.

    Args:
        model, head: Their updates.
    """

    def __init__(self, model: ModelWeightUpdate, head: ModelWeightUpdate) -> None:
        self._model, self._head = model, head

    @property
    def storage_replaced(self) -> bool:
        """As ModelWeightUpdate."""
        return self._model.storage_replaced or self._head.storage_replaced

    def check(self, found: Mapping[str, TensorEntry], where: Path, *, whole: bool) -> dict[str, TensorEntry]:
        """As `ModelWeightUpdate.check`."""
        of_head = self._head.check(found, where, whole=whole)
        return {
            **self._model.check(found, where, whole=whole),
            **{_OF_HEAD + name: entry for name, entry in of_head.items()},
        }

    def is_packed(self, name: str) -> bool:
        """As `ModelWeightUpdate.is_packed`."""
        return self._model.is_packed(name) or self._head.is_packed(name)

    def load(self, name: str, entry: TensorEntry, copy: CopyTensor) -> None:
        """As `ModelWeightUpdate.load`."""
        if name.startswith(_OF_HEAD):
            self._head.load(name.removeprefix(_OF_HEAD), entry, copy)
        else:
            self._model.load(name, entry, copy)

    def check_complete(self, *, whole: bool = False, upcoming: Collection[str] = ()) -> None:
        """As `ModelWeightUpdate.check_complete`."""
        of_head = [name.removeprefix(_OF_HEAD) for name in upcoming if name.startswith(_OF_HEAD)]
        self._model.check_complete(whole=whole, upcoming=upcoming)
        self._head.check_complete(whole=whole, upcoming=of_head)

    def finish(self) -> None:
        """As `ModelWeightUpdate.finish`."""
        self._model.finish()
        self._head.finish()


def drop_attributes(module: nn.Module, names: Iterable[str]) -> None:
    """Sets attributes of a module to None, which frees their tensors."""
    for name in names:
        (module._parameters if name in module._parameters else vars(module))[name] = None


_MODULE_STATE = frozenset(vars(nn.Module()))


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The tensors and other attributes of a module itself, without its submodules."""
    own = {name: value for name, value in vars(module).items() if name not in _MODULE_STATE}
    parts = {name: part for name, part in module._modules.items() if isinstance(part, QuantizedMatrix)}
    return {**own, **parts, **module._parameters, **module._buffers}


def _is_like(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and a.layout == b.layout


def _same_parameters(new: nn.Module, live: nn.Module) -> bool:
    """Whether all parameters that the loader fills are parameters of the loaded module as well."""
    for name, parameter in new._parameters.items():
        found = live._parameters.get(name)
        if parameter is not None and (found is None or not _is_like(found, parameter)):
            return False
    return True


def write_in_place(old: Any, new: Any) -> bool:
    """Copies the tensors of a prepared weight over those of another one of the same structure.

    Looks into dataclasses, containers, and variables of functions. A tensor with the attribute `is_read_only` is not
    written to, and 64-bit integers have to be equal: they may be addresses or positions.

    Returns:
        Whether the structures, and whatever is not a tensor, are equal. If not, the old weight may be half written and
        must be replaced.
    """
    return _visit_pairs(old, new, _copy_tensor)


def same_structure(old: Any, new: Any) -> bool:
    """Whether two prepared weights differ at most in the values of their tensors."""
    return _visit_pairs(old, new, lambda a, b: isinstance(a, torch.Tensor) and _is_like(a, b))


Visit = Callable[[Any, torch.Tensor], bool]
"""Gets a tensor of a weight, and what another weight has in its place. Returns whether that fits."""


def _visit_pairs(old: Any, new: Any, visit: Visit) -> bool:
    """Whether `visit` returns True for all tensors of a weight, and everything else is equal."""
    if old is new:
        return True
    if isinstance(new, torch.Tensor):
        return visit(old, new)
    if dataclasses.is_dataclass(new) and type(old) is type(new):
        names = [field.name for field in dataclasses.fields(new)]
        return all(_visit_pairs(getattr(old, name), getattr(new, name), visit) for name in names)
    if callable(new):
        return _visit_function(old, new, visit)
    if type(old) is not type(new):
        return False
    if isinstance(new, dict):
        return old.keys() == new.keys() and all(_visit_pairs(old[key], new[key], visit) for key in new)
    if isinstance(new, list | tuple):
        return len(old) == len(new) and all(_visit_pairs(a, b, visit) for a, b in zip(old, new, strict=True))
    return bool(old == new)


def _copy_tensor(old: Any, new: torch.Tensor) -> bool:
    if not isinstance(old, torch.Tensor) or not _is_like(old, new) or getattr(old, "is_read_only", False):
        return False
    if old.layout is not torch.strided or old.stride() != new.stride():
        return False
    if new.dtype == torch.int64:  # may be addresses of the weight's other tensors, which are different ones
        return torch.equal(old, new)
    with torch.no_grad():
        old.detach().copy_(new.detach())
    return True


def _visit_function(old: Any, new: Any, visit: Visit) -> bool:
    """Visits the tensors among a function's variables. `old` may be a wrapper that calls the function."""
    if old == new:
        return True
    if isinstance(old, functools.partial) and isinstance(new, functools.partial):
        parts = ("func", "args", "keywords")
        return all(_visit_pairs(getattr(old, part), getattr(new, part), visit) for part in parts)
    if not isinstance(old, types.FunctionType):
        return False
    variables = [cell.cell_contents for cell in old.__closure__ or ()]
    if isinstance(new, types.FunctionType) and old.__code__ is new.__code__:
        others = [cell.cell_contents for cell in new.__closure__ or ()]
        return all(_visit_pairs(a, b, visit) for a, b in zip(variables, others, strict=True))
    return any(_visit_function(value, new, visit) for value in variables if callable(value))


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more
