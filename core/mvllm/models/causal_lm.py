"""CausalLM, the base class of models: pipeline stage, embedding, head, and the map from checkpoint names to parameters.

Every layer lists the checkpoint tensors that fill it (`weight_targets`); a model's map is the union of these lists.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.config.token_spaces import TokenSpace
from mvllm.errors import ModelError
from mvllm.layers.attention import Attention
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.embedding import LMHead, VocabEmbedding
from mvllm.layers.item_rows import replace_rows
from mvllm.layers.pipeline_stage import PipelineStage
from mvllm.layers.state import SequenceState
from mvllm.layers.weight_target import WeightTarget
from mvllm.models.item_encoder import ItemEncoder
from mvllm.models.module_names import ModuleNames


class CausalLM(nn.Module, ABC):
    """A language model on one rank.

    Subclasses build their layers in `__init__`. Class attributes name the checkpoint tensors that belong to one
    pipeline stage only.

    Attributes:
        config: The model's configuration.
        stage: The layers of this rank.
        head_name: The checkpoint module of an untied head.
        ties_embeddings_by_default: Default of `tie_word_embeddings`.
        layer_names: Regular expression for names of per-layer tensors; its first group is the layer's number.
        first_stage_names, last_stage_names: Name prefixes of tensors that only that stage holds.
        ignored_names: Regular expression for names of checkpoint tensors that are not weights.
        uses_prompt_lens, uses_token_types: Whether the model reads `ForwardStep`'s field of that name.
        original_context: With `uses_prompt_lens`: tokens of prompts up to this length do not need it, nor does the last
            token of any prompt or a later one.
        reads_per_layer_config: Whether the model reads `per_layer_config`, settings of single layers. Models that do
            not read it refuse it.
        module_names: Names of modules in checkpoints that differ from those of this class.
        remote_methods: Methods that front ends may call between two steps (`LLMEngine.call_model`). Their arguments are
            numbers, texts, bytes, lists and dicts, and so is their result, which is None on ranks that do not answer.
        lm_head: The language-model head on the last stage, else None; None if the checkpoint has none.
        tied_names: The tensors of a tied head and of the embedding, on one rank of the last stage, else None. A
            checkpoint that has both must have equal ones.
        item_encoder: Encoders of images and audio on the first stage of multimodal models; else None.
        keeps_layers: Whether `forward` adds to `ForwardStep.kept_states` the residual stream before the layers of
            `kept_layers`.
        scores: Classification head on the last stage: pooled states [n, hidden_size] to [n, labels]; else None.
    """

    layer_names: re.Pattern[str] = re.compile(r"model\.layers\.(\d+)\.")
    first_stage_names: tuple[str, ...] = ()
    last_stage_names: tuple[str, ...] = ()
    ignored_names: re.Pattern[str] = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
    head_name: str = "lm_head"
    ties_embeddings_by_default: bool = False
    uses_prompt_lens: bool = False
    original_context: int = 0
    uses_token_types: bool = False
    reads_per_layer_config: bool = False
    keeps_layers: bool = False
    module_names: ModuleNames = ModuleNames({})
    remote_methods: frozenset[str] = frozenset()
    lm_head: LMHead | None

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        if config.hf_config.get("per_layer_config") and not self.reads_per_layer_config:
            raise ModelError(
                f"{config.hf_config.source}: per_layer_config gives single layers other settings, which "
                f"{config.architecture} does not support here. Use a checkpoint whose layers have the same settings."
            )
        self.config = config
        self.stage = self._make_stage(ctx)
        self.scores: nn.Module | None = None
        self.item_encoder: ItemEncoder | None = None
        self.tied_names: tuple[str, str] | None = None
        self._quantization = ctx.quantization
        if ctx.quantization is not None:
            ctx.quantization.use_names(self._checkpoint_namer())
        self._place, self._uses_several_devices = ctx.place, ctx.num_devices > 1
        self._placed: dict[nn.Parameter, nn.Parameter] = {}
        self._on_host: frozenset[nn.Module] = frozenset()  # not on the devices
        # By checkpoint tensor: modules that it fills, with the names of their tensors that are not loaded yet.
        self._unloaded: dict[str, list[tuple[nn.Module, set[str]]]] = {}
        self._prepared: set[nn.Module] = set()

    @abstractmethod
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardStep,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs this rank's layers over the tokens of one step.

        Args:
            input_ids: [T], int32 or int64. Read by the first stage only.
            positions: [T], int32 or int64: each token's position in its sequence.
            step: Attention metadata.
            intermediate: [T, hidden_size], compute dtype: the previous stage's result; None on the first stage. Its
                storage may be reused.

        Returns:
            [T, hidden_size]: on the last stage the input of `compute_logits`, else the next stage's `intermediate`.
        """

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Last stage only: rows of `forward`'s result [n, hidden_size] to logits [n, vocab_size], compute dtype."""
        assert self.lm_head is not None, "only the last pipeline stage computes logits"
        return self.lm_head(hidden)

    @property
    def token_spaces(self) -> Mapping[str, TokenSpace]:
        """Spaces of tokens beside text, by name."""
        return self.config.token_spaces

    def compute_space_logits(self, hidden: torch.Tensor, space: TokenSpace) -> torch.Tensor:
        """Last stage only: the logits of a space with a head of its own.

        Args:
            hidden: [n, hidden_size]: rows of `forward`'s result.
            space: One of `token_spaces` whose `has_own_head` is set.

        Returns:
            [n, space.size], compute dtype.
        """
        raise ModelError(
            f"{type(self).__name__} computes no logits for the token space {space.name!r}, which config.json declares. "
            "A model with such a space overrides compute_space_logits."
        )

    def run_largest_call(self) -> None:
        """Runs the largest call of `remote_methods`, so that its memory is measured before the KV cache is sized.

        Not called on the host, where memory is not measured.
        """

    def merge_items(self, embeddings: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """First stage only: the embeddings of a step's tokens [T, hidden_size], with those of items in their places."""
        if step.item_embeds is None:
            return embeddings
        return replace_rows(embeddings, step.item_embeds[:, : embeddings.shape[1]], step)

    def attention_layers(self) -> list[Attention]:
        """The attention of each layer on this rank, in layer order."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    def state_layers(self) -> list[SequenceState]:
        """The sequence state of each layer on this rank that has one, in layer order."""
        return [module for module in self.modules() if isinstance(module, SequenceState)]

    def weight_targets(self) -> dict[str, list[WeightTarget]]:
        """Targets on this rank by checkpoint tensor name. The checkpoint must have each of these tensors."""
        targets: dict[str, list[WeightTarget]] = {}
        self._unloaded = {}
        for module in self.modules():
            of_module = getattr(module, "weight_targets", None)
            if module is not self and of_module is not None:
                names = set()
                for name, target in of_module():
                    targets.setdefault(name, []).append(target)
                    names.add(name)
                if self._uses_several_devices or hasattr(module, "prepare_weights"):
                    for name in names:
                        self._unloaded.setdefault(name, []).append((module, names))
        return targets

    def unprepared_modules(self) -> dict[nn.Module, frozenset[str]]:
        """The modules that `tensor_loaded` will prepare, and their tensors. Call it after `weight_targets`."""
        return {module: frozenset(names) for entries in self._unloaded.values() for module, names in entries}

    def tensor_loaded(self, name: str) -> None:
        """Prepares the modules whose tensors are now all loaded: shards their weights over the worker's devices, and
        lets op providers convert them.

        Each layer is converted as soon as it is loaded, so at most one layer is in memory both converted and not.

        Args:
            name: A checkpoint tensor all of whose targets are filled, as in `weight_targets`.
        """
        for module, names in self._unloaded.pop(name, ()):
            names.remove(name)
            if not names:
                self._prepared.add(module)
                self._prepare(module)
            elif (loaded := getattr(module, "tensor_loaded", None)) is not None:
                loaded(name)

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint tensor without target may be skipped.

        Args:
            name: As in `weight_targets`.
        """
        if self.ignored_names.search(name):
            return True
        if self._quantization is not None and self._quantization.ignores(name):
            return True
        layer = self.layer_names.match(name)
        if layer is not None:
            number = int(layer.group(1))
            return number < self.config.num_layers and not self.stage.first <= number < self.stage.stop
        if self.ties_head and name == f"{self.head_name}.weight":
            return True
        if self.config.kind.lacks_head and name.startswith(f"{self.head_name}."):
            return True  # of an update of the weights
        return (not self.stage.is_first and name.startswith(self.first_stage_names)) or (
            not self.stage.is_last and name.startswith((*self.last_stage_names, self.head_name))
        )

    def given_name(self, name: str) -> str:
        """The name in `weight_targets` of a checkpoint tensor."""
        name = self.model_name(name)
        return name if self._quantization is None else self._quantization.given_name(name)

    def model_name(self, name: str) -> str:
        """The name in this class of a tensor or module of a checkpoint or adapter. Overridden by families whose
        checkpoints have other names than their base class."""
        return self.module_names.ours(name)

    @classmethod
    def checkpoint_names(cls, name: str) -> tuple[str, ...]:
        """The names that checkpoints and their settings may have for the module `name`, without that name."""
        return cls.module_names.theirs(name)

    def after_load(self) -> None:
        """Prepares the remaining modules, which use another module's weight. Called once, after loading."""
        prepared = self._prepared
        for module in list(self.modules()):
            if module not in prepared:
                self._prepare(module)
        self._placed.clear()
        prepared.clear()  # contains the model itself: a reference cycle

    @property
    def ties_head(self) -> bool:
        """Whether the head is the token embedding."""
        return bool(self.config.hf_config.get("tie_word_embeddings", self.ties_embeddings_by_default))

    def _checkpoint_namer(self) -> Callable[[str], Sequence[str]]:
        """As `checkpoint_names`. It does not refer to the model: a quantization method keeps it."""
        return self.checkpoint_names

    def _make_stage(self, ctx: BuildContext) -> PipelineStage:
        """The layers of this rank. Called while the model is built."""
        return PipelineStage.for_rank(self.config.num_layers, ctx.pp)

    def _build_embedding(self, ctx: BuildContext, name: str, size: int) -> VocabEmbedding | None:
        return VocabEmbedding(ctx, name, self.config.vocab_size, size) if self.stage.is_first else None

    def _build_head(
        self, ctx: BuildContext, embedding_name: str, size: int, embedding: VocabEmbedding | None
    ) -> LMHead | None:
        if not self.stage.is_last or self.config.kind.lacks_head:
            return None
        if self.ties_head:
            if ctx.tp.is_first:
                self.tied_names = f"{self.head_name}.weight", f"{embedding_name}.weight"
            return LMHead(ctx, embedding_name, self.config.vocab_size, size, tied=True, tied_to=embedding)
        return LMHead(ctx, self.head_name, self.config.vocab_size, size)

    def _layer_numbers(self) -> Iterator[int]:
        return iter(range(self.stage.first, self.stage.stop))

    def _prepare(self, module: nn.Module) -> None:
        if self._uses_several_devices and module not in self._on_host:
            self._shard_parameters(module)
        prepare = getattr(module, "prepare_weights", None)
        if prepare is not None:
            prepare()

    def _shard_parameters(self, module: nn.Module) -> None:
        """Shards the parameters of a module over the devices of this worker along the module's `partitions`."""
        partitions: Mapping[str, int] = getattr(module, "partitions", {})
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in self._placed:
                if not hasattr(module, "weight_targets"):  # another module's parameter, or not loaded from a checkpoint
                    continue
                placed = self._place(parameter.data, partitions.get(name))
                self._placed[parameter] = nn.Parameter(placed, requires_grad=False)
            setattr(module, name, self._placed[parameter])


def layer_norm_epsilon(config: ModelConfig) -> float:
    """`layer_norm_epsilon` of GPT-2's and Falcon's config.json."""
    return config.hf_config.positive_number("layer_norm_epsilon", 1e-5)
