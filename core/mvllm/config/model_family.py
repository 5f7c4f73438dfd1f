"""ModelFamily: the record of a family of models, which holds all that other modules have to know of it. Needs no torch.

    config.json  ──ModelType by `model_type`────────> ModelConfig: how its keys are read
    ModelConfig  ──Architecture by `architectures`──> model class, what it takes beside text, how items are processed

Classes are named as `module:class` and imported by who uses them: a front end reads records without importing models.
Records of core are in `mvllm.families`; those of other packages are found by entry points (see `config.families`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mvllm.config.hf_config import HFConfig
from mvllm.config.multimodal import MultiModalModel
from mvllm.config.token_spaces import ReadSpaces

ReadItems = Callable[[HFConfig], MultiModalModel | None]
"""Reads what a model takes beside text from config.json, which has the values of `text_config` at the top level (see
`load_hf_config`). None: the checkpoint has no encoders.

Raises ModelError for values that are missing or invalid."""


@dataclass(frozen=True)
class ModelType:
    """How a config.json of one `model_type` is read, where that differs from other models.

    The first attributes are about language models, the last three about checkpoints with encoders and a `text_config`.

    Attributes:
        architecture: The architecture of a language model, for config.json without `architectures`, and for a
            `text_config` of this type. None for a type that only occurs together with `architectures`.
        head_dim: Default of that key; None for `hidden_size` divided by the number of heads.
        sliding_window: Default of that key; None for full attention.
        use_sliding_window: Default of that key. False: `sliding_window` has no effect unless config.json has the key.
        never_sliding: Every layer has full attention, whatever config.json says.
        context_length: Tokens of a sequence where config.json has no key for it; None if it must have one.
        rope_defaults: RoPE settings of config.json without any.
        key_aliases: Second names of keys, and the names that model classes read. A value under the latter is preferred.
        simplify: Drops from config.json, without its `text_config`, what is large and unused, in place. Its second
            argument is the file's path, for errors.
        read_config: Changes the values of config.json to those that model classes read; runs last. None for no change.
        text_defaults: Values that a `text_config` of this type leaves out; in a type with `text_type`, those that
            differ from the defaults of the text model.
        text_type: `model_type` of a `text_config` that has none. None: `text_config` leaves nothing out.
        tied_by_text: The head is tied if either the whole config or its `text_config` says so.
    """

    architecture: str | None = None
    head_dim: int | None = None
    sliding_window: int | None = None
    use_sliding_window: bool = True
    never_sliding: bool = False
    context_length: int | None = None
    rope_defaults: Mapping[str, Any] = field(default_factory=dict)
    key_aliases: Mapping[str, str] = field(default_factory=dict)
    simplify: Callable[[dict[str, Any], str], None] | None = None
    read_config: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    text_defaults: Mapping[str, Any] = field(default_factory=dict)
    text_type: str | None = None
    tied_by_text: bool = False


@dataclass(frozen=True)
class MTPHeads:
    """The multi-token-prediction (MTP) modules of an architecture, which the method `mtp` of speculative_config uses.

    Attributes:
        head: The class of the first module, a DraftHead, as `module:class`.
        tensors: Prefix of the names of its tensors in checkpoints. `{layer}` stands for the number of layers.
        count_keys: Keys of config.json of which the first that is there has the number of modules.
        default_count: That number where config.json has none of these keys.
    """

    head: str
    tensors: str
    count_keys: tuple[str, ...] = ("num_nextn_predict_layers",)
    default_count: int = 0


@dataclass(frozen=True)
class Architecture:
    """One entry of `architectures` of config.json.

    Attributes:
        model: The model class, a CausalLM, as `module:class`. If several are named, the model class is derived from
            them, in this order.
        language_model: The architecture of the language model that checkpoints have if they do not name one; its class
            is then the last one that the model class is derived from. None: `model` is the whole model.
        read_items: Reads what the model takes beside text; None for a model that takes text alone.
        read_spaces: Reads the token spaces; None for models of text alone.
        items: The subclass of ItemFamily that processes its items, as `module:class`; None for ItemFamily.
        is_encoder: Its attention is bidirectional.
        is_headless: It has no language-model head. Its output is a vector, or the scores of classes if its name ends in
            `ForSequenceClassification`.
        gives_token_vectors: Its output is a vector for each token, for late interaction. config.json may have that of
            the language model as `vlm_config`.
        keeps_layers: A step may keep the residual stream before a layer, see `CausalLM.keeps_layers`.
        may_be_text: There are checkpoints without encoders, which are run as their language model.
        tool_parser, reasoning_parser: Names of the parsers for the model's text, used where its chat template shows no
            known format and no setting names one. None for no parser.
        mtp: Its multi-token-prediction modules; None if it has none, or if they are not supported.
    """

    model: str | tuple[str, ...]
    language_model: str | None = None
    read_items: ReadItems | None = None
    read_spaces: ReadSpaces | None = None
    items: str | None = None
    is_encoder: bool = False
    is_headless: bool = False
    gives_token_vectors: bool = False
    may_be_text: bool = False
    keeps_layers: bool = True
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    mtp: MTPHeads | None = None

    @property
    def bases(self) -> tuple[str, ...]:
        """`model` as a tuple."""
        return (self.model,) if isinstance(self.model, str) else self.model


@dataclass(frozen=True)
class ModelFamily:
    """The record of a family: the constant `FAMILY` of a module that imports no torch.

    Attributes:
        architectures: By name, as `architectures` of config.json has it.
        model_types: By `model_type` of config.json, or of its `text_config`.
    """

    architectures: Mapping[str, Architecture]
    model_types: Mapping[str, ModelType] = field(default_factory=dict)


def pooling_architectures(name: str, model: str) -> dict[str, Architecture]:
    """The architectures `<name>Model` and `<name>ForSequenceClassification` of a decoder.

    Args:
        model: The class of the decoder with its language-model head, as `module:class`.
    """
    heads = {"Model": "PoolingModel", "ForSequenceClassification": "SequenceClassificationModel"}
    return {
        f"{name}{end}": Architecture((f"mvllm.models.pooling_model:{kind}", model), is_headless=True)
        for end, kind in heads.items()
    }
