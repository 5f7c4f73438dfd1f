"""A class for `worker_extension_cls`."""

from __future__ import annotations

from typing import Any


class Extension:
    """Methods that a test calls on every worker."""

    def sum_of(self, name: str, *, scale: float = 1.0) -> float:
        model: Any = self.get_model()  # type: ignore[attr-defined]
        return float(dict(model.named_parameters())[name].double().sum()) * scale

    def model_itself(self) -> object:
        return self.get_model()  # type: ignore[attr-defined]

    def fail(self) -> None:
        raise ValueError("as asked")


class Conflicting:
    """Redefines a method of the worker."""

    def execute_model(self, plan: object) -> None:
        return None
