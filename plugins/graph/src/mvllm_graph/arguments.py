"""Arguments of operations as flat lists of arrays and attributes, and back.

A graph has arrays and plain attributes only. A weight that is a dataclass is flattened to the arrays of its fields, in
their order, and to attributes that are named by their path:

    quantized_linear(x, QuantizedWeight(values, scales, zero_points, group_size=32, bits=4), bias)
    inputs      x, weight.values, weight.scales, weight.zero_points, bias
    attributes  weight.group_size=32, weight.bits=4, weight.int8_activations=False

A sequence has the attribute of its own path: its length. Where a field may have one of several classes, the attribute
of its path is the class's name.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mvllm.extension_api.models import dtype_name, torch_dtype


@dataclass
class FlatArguments:
    """The arguments of one call.

    Attributes:
        labels: The path of each input.
        inputs: The arrays, in order; None for an absent one.
        attributes: The others, by path.
    """

    labels: list[str] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)


def flatten(function: Callable[..., Any], arguments: Sequence[Any]) -> FlatArguments:
    """Flattens the positional arguments of an operation's reference; missing ones have their defaults."""
    flat = FlatArguments()
    for (name, kind), value in zip(_parameters(function), _completed(function, arguments), strict=True):
        _flatten(name, kind, value, flat)
    return flat


def unflatten(function: Callable[..., Any], inputs: Sequence[Any], attributes: Mapping[str, Any]) -> list[Any]:
    """The positional arguments that `flatten` flattened."""
    remaining = iter(inputs)
    return [_unflatten(name, kind, remaining, attributes) for name, kind in _parameters(function)]


def array_parameters(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters of an operation's reference that are arrays."""
    return [name for name, kind in _parameters(function) if torch.Tensor in _alternatives(kind)]


@functools.cache
def _hints(owner: Any) -> dict[str, Any]:
    return typing.get_type_hints(owner)


@functools.cache
def _parameters(function: Callable[..., Any]) -> tuple[tuple[str, Any], ...]:
    hints = _hints(function)
    return tuple((name, hints[name]) for name in inspect.signature(function).parameters)


def _completed(function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
    defaults = [parameter.default for parameter in inspect.signature(function).parameters.values()]
    return [*arguments, *defaults[len(arguments) :]]


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """The classes of a union, without None."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return tuple(each for each in typing.get_args(kind) if each is not type(None))
    return (kind,)


def _item_kind(kind: Any) -> Any:
    """The class of the items of a sequence of dataclasses; None for another type."""
    if typing.get_origin(kind) in (tuple, list, collections.abc.Sequence):
        item = typing.get_args(kind)[0]
        return item if any(dataclasses.is_dataclass(each) for each in _alternatives(item)) else None
    return None


def _flatten(path: str, kind: Any, value: Any, flat: FlatArguments) -> None:
    kinds = _alternatives(kind)
    if torch.Tensor in kinds:
        flat.labels.append(path)
        flat.inputs.append(value)
    elif (item := _item_kind(kinds[0])) is not None:
        flat.attributes[path] = len(value)
        for i, each in enumerate(value):
            _flatten(f"{path}.{i}", item, each, flat)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        if len(kinds) > 1:
            flat.attributes[path] = type(value).__name__
        for name, of_field in _fields(type(value)):
            _flatten(f"{path}.{name}", of_field, getattr(value, name), flat)
    else:
        flat.attributes[path] = dtype_name(value) if isinstance(value, torch.dtype) else value


def _unflatten(path: str, kind: Any, inputs: Iterator[Any], attributes: Mapping[str, Any]) -> Any:
    kinds = _alternatives(kind)
    if torch.Tensor in kinds:
        return next(inputs)
    if (item := _item_kind(kinds[0])) is not None:
        return tuple(_unflatten(f"{path}.{i}", item, inputs, attributes) for i in range(attributes[path]))
    classes: list[Any] = [each for each in kinds if dataclasses.is_dataclass(each)]
    if classes and not (path in attributes and attributes[path] is None):
        cls = classes[0] if len(classes) == 1 else next(c for c in classes if c.__name__ == attributes[path])
        return cls(*(_unflatten(f"{path}.{name}", of, inputs, attributes) for name, of in _fields(cls)))
    value = attributes[path]
    return torch_dtype(value) if torch.dtype in kinds and value is not None else value


def _fields(cls: Any) -> list[tuple[str, Any]]:
    hints = _hints(cls)
    return [(each.name, hints[each.name]) for each in dataclasses.fields(cls)]
