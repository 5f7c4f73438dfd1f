"""How one prompt becomes a vector: which hidden states count, and what is done to their combination."""

from __future__ import annotations

import enum

import msgspec

from mvllm.errors import RequestError


class PoolingType(enum.StrEnum):
    """Which of a prompt's last hidden states make its vector.

    `LAST` takes that of the last token, `CLS` that of the first, `MEAN` the mean over all.
    """

    LAST = "last"
    CLS = "cls"
    MEAN = "mean"

    @property
    def needs_every_position(self) -> bool:
        """Whether states count that a prompt found in the prefix cache would not have computed."""
        return self is not PoolingType.LAST


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a caller asks of an embedding. None leaves a choice to the model.

    Attributes:
        pooling_type: `last`, `cls` or `mean`. By default what the model folder's `modules.json` names, and `last` where
            there is none.
        normalize: Scale the vector to length 1. By default what `modules.json` says, and true where there is none.
        dimensions: Keep only the first so many components, before scaling; for models trained to allow that
            (matryoshka). By default all.
    """

    pooling_type: PoolingType | None = None
    normalize: bool | None = None
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.pooling_type is not None:
            try:
                self.pooling_type = PoolingType(self.pooling_type)
            except ValueError:
                raise RequestError(
                    f"pooling_type must be one of {', '.join(PoolingType)}; found {self.pooling_type!r:.40}.",
                    parameter="pooling_type",
                ) from None
        if self.normalize is not None and not isinstance(self.normalize, bool):
            raise RequestError(f"normalize must be true or false; found {self.normalize!r:.40}.", parameter="normalize")
        dimensions = self.dimensions
        if dimensions is not None and (
            isinstance(dimensions, bool) or not isinstance(dimensions, int) or dimensions < 1
        ):
            raise RequestError(f"dimensions must be at least 1; found {dimensions!r:.40}.", parameter="dimensions")
