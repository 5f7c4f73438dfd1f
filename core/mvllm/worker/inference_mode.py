"""A decorator for methods that run in the device's inference mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

from mvllm.platform.runtime import DeviceRuntime

_Method = TypeVar("_Method", bound=Callable[..., Any])


class _HasRuntime(Protocol):
    _runtime: DeviceRuntime


def in_inference_mode(method: _Method) -> _Method:
    """Runs a method in the inference mode of its object's `_runtime`."""

    @wraps(method)
    def within(self: _HasRuntime, *args: Any, **kwargs: Any) -> Any:
        with self._runtime.inference_mode():
            return method(self, *args, **kwargs)

    return cast(_Method, within)
