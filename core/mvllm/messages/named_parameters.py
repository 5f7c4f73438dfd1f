"""The metaclass of parameters that users construct: a misspelt keyword is an error that names the nearest one."""

from __future__ import annotations

from typing import Any

import msgspec


class NamedParameters(type(msgspec.Struct)):  # type: ignore[misc]
    """As msgspec's metaclass of structs, with another TypeError for unknown keywords."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except TypeError:
            if args:
                raise TypeError(f"{cls.__name__} takes parameters by name only, {cls.__name__}(name=value).") from None
            unknown = next((name for name in kwargs if name not in cls.__struct_fields__), None)
            if unknown is None:
                raise
            from difflib import get_close_matches

            nearest = get_close_matches(unknown, cls.__struct_fields__, n=1, cutoff=0.7)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
            raise TypeError(f"{cls.__name__} has no parameter {unknown!r}.{hint}") from None
