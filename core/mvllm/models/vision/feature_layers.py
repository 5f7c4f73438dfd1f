"""FeatureLayers: which layers of a vision tower an image's features are taken from."""

from __future__ import annotations

from dataclasses import dataclass

from mvllm.config.hf_config import HFConfig
from mvllm.errors import ModelError


@dataclass(frozen=True)
class FeatureLayers:
    """`vision_feature_layer` and `vision_feature_select_strategy` of config.json.

    Attributes:
        layers: Numbers of states: 0 is the input of the first layer, i the output of layer i, negative ones count from
            the last output, -1.
        without_class: The first vector is left out, which is that of the class embedding in towers that have one.
        source: The file, for messages.
    """

    layers: tuple[int, ...]
    without_class: bool
    source: str

    @classmethod
    def from_config(cls, hf: HFConfig, *, layer: int, strategy: str) -> FeatureLayers:
        """Reads the two keys; `layer` and `strategy` are the family's defaults.

        Raises:
            ModelError: A value is not one that is known.
        """
        found = hf.get("vision_feature_layer", layer)
        layers = found if isinstance(found, list) and found else [found]
        if not all(type(each) is int for each in layers):
            raise ModelError(
                f"{hf.source}: 'vision_feature_layer' should be an integer or a list of them, found {found!r:.80}."
            )
        chosen = hf.get("vision_feature_select_strategy", strategy)
        if chosen not in ("default", "full"):
            raise ModelError(
                f"{hf.source}: 'vision_feature_select_strategy' should be 'default' or 'full', found {chosen!r:.80}."
            )
        return cls(tuple(layers), chosen == "default", hf.source)

    def numbers(self, num_layers: int) -> tuple[int, ...]:
        """The same, from 0 to `num_layers`, for a tower of that many layers.

        Raises:
            ModelError: The tower has no such layer.
        """
        numbers = tuple(each if each >= 0 else num_layers + 1 + each for each in self.layers)
        if not all(0 <= number <= num_layers for number in numbers):
            raise ModelError(
                f"{self.source}: 'vision_feature_layer' is {list(self.layers)}, but the tower has {num_layers} layers."
            )
        return numbers
