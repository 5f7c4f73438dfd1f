"""Tiny checkpoints with a multi-token-prediction (MTP) module, and that module in plain torch on transformers' layers.

transformers leaves these modules out. So a module is made of a second model of the family with one layer:

    checkpoint      a model of the zoo + the second model's layer and last norm, renamed + two norms and a projection
    MTPReference    projection(embedding, hidden state) ──as inputs_embeds──> the second model ──> the model's head
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from mvllm.config.mtp import mtp_heads
from mvllm.layers.context import BuildContext
from mvllm.layers.quantization.registry import quantization_method
from mvllm.models.mtp_head import MTPHead
from mvllm.models.weight_loader import load_weights
from tests.helpers.model_zoo import ZOO, make_tokenizer, model_of
from tests.helpers.paged_driver import make_context, read_config


@dataclass(frozen=True)
class Form:
    """How checkpoints name a module; `{layer}` stands for the number of layers.

    Attributes:
        layer, embedding_norm, hidden_norm, projection, norm: The modules; `norm` is None if it is the model's.
        hidden_first: The projection reads the hidden state first.
        copies: Copies of the model's embedding and head.
    """

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str | None
    hidden_first: bool = False
    copies: tuple[str, ...] = ()


_NEXTN = Form(
    "model.layers.{layer}",
    *(f"model.layers.{{layer}}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    copies=("model.layers.{layer}.embed_tokens.weight", "model.layers.{layer}.shared_head.head.weight"),
)
_MTP = Form("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
_ERNIE = Form(*(f"model.mtp_{name}.0" for name in ("block", "emb_norm", "hidden_norm", "linear_proj")), norm=None)
_MIMO = Form(
    "model.mtp_layers.0",
    *(f"model.mtp_layers.0.{name}" for name in ("token_layernorm", "hidden_layernorm", "input_proj")),
    norm="model.mtp_layers.0.final_layernorm",
    hidden_first=True,
)


@dataclass(frozen=True)
class MTPEntry:
    """One checkpoint.

    Attributes:
        model: The key of ZOO.
        form: The module's names.
        layer: Settings of the second model, of one layer by default, that differ from the model's.
        config: Keys of config.json that differ from those of the model.
    """

    model: str
    form: Form = _NEXTN
    layer: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=lambda: {"num_nextn_predict_layers": 1})


_SPARSE = {"first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]}
_FULL = {"layer_types": ["full_attention"]}

MTP_ZOO: dict[str, MTPEntry] = {
    "deepseek3": MTPEntry("deepseek3", layer=_SPARSE),
    "dsa": MTPEntry("dsa", layer=_SPARSE),
    "glm4moe": MTPEntry("glm4moe", layer=_SPARSE),
    "glm4moelite": MTPEntry("glm4moelite", layer=_SPARSE),
    "glm5": MTPEntry("glm5", layer={**_SPARSE, "indexer_types": ["full"]}),
    "qwen3next": MTPEntry("qwen3next", _MTP, _FULL, {}),
    "qwen35": MTPEntry("qwen35", _MTP, _FULL, {"mtp_num_hidden_layers": 1}),
    "qwen35moe": MTPEntry("qwen35moe", _MTP, _FULL, {"mtp_num_hidden_layers": 1}),
    "qwen35moe-text": MTPEntry("qwen35moe-text", _MTP, _FULL, {"mtp_num_hidden_layers": 1}),
    "qwen35-text-tied": MTPEntry("qwen35-text-tied", _MTP, _FULL, {"mtp_num_hidden_layers": 1}),
    "exaonemoe": MTPEntry("exaonemoe", _MTP, {"mlp_layer_types": ["dense"], "layer_types": ["sliding_attention"]}),
    "exaonemoe-full": MTPEntry(
        "exaonemoe",
        _MTP,
        {"mlp_layer_types": ["dense"], "layer_types": ["full_attention"], "sliding_window": 9},
        {"num_nextn_predict_layers": 1, "mtp_layer_types": ["full_attention"]},
    ),
    "ernie45moe": MTPEntry("ernie45moe", _ERNIE, {"moe_layer_start_index": 1}),
    "nemotronh": MTPEntry(
        "nemotronh",
        Form(
            "mtp.layers.{layer}",
            *(f"mtp.layers.0.{name}" for name in ("enorm", "hnorm", "eh_proj")),
            norm="mtp.layers.1.final_layernorm",
        ),
        {"layers_block_type": ["full_attention", "moe"], "num_hidden_layers": 2},
        {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"},
    ),
    "mimo": MTPEntry(
        "qwen2",
        _MIMO,
        config={"num_nextn_predict_layers": 1, "model_type": "mimo", "architectures": ["MiMoForCausalLM"]},
    ),
}


_OF_LAYER = re.compile(r"(?:model|backbone)\.layers\.(\d+)(?=\.)")
_LAST_NORM = re.compile(r"(model|backbone)\.norm(_f)?\.weight")


def last_norm(model: PreTrainedModel) -> nn.Module:
    """The norm before the model's head."""
    found: nn.Module = getattr(model.model, "norm", None) or model.model.norm_f
    return found


class MTPReference:
    """A model and its module, in plain torch.

    Args:
        name: A key of MTP_ZOO.
        folder: Where the checkpoint is written.
        seed: Of the weights.
        edit: Changes the weights of the model and of the module's layer, and those in front of it.
    """

    def __init__(
        self, name: str, folder: Path, *, seed: int = 0, edit: Callable[[MTPReference], None] | None = None
    ) -> None:
        entry = MTP_ZOO[name]
        self.form = form = entry.form
        config = ZOO[entry.model].config()
        self.model = model_of(config, seed=ZOO[entry.model].seed + seed)
        values = {**config.to_dict(), "num_hidden_layers": 1, **entry.layer}
        for key in ("layer_types", "mlp_layer_types", "indexer_types"):
            if isinstance(values.get(key), list):
                values[key] = values[key][:1]
        self.second = model_of(type(config)(**values), seed=seed + 17)
        size, generator = config.hidden_size, torch.Generator().manual_seed(seed + 29)
        self.projection = torch.randn(size, 2 * size, generator=generator) * (1.4 / (2 * size) ** 0.5)
        norm = type(last_norm(self.second))
        eps = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
        self.embedding_norm, self.hidden_norm = (norm(size, eps=eps) for _ in range(2))
        offset = 0.0 if (norm(size).weight == 0).all() else 1.0
        with torch.no_grad():
            for module in (self.embedding_norm, self.hidden_norm):
                module.weight.copy_(offset + 0.2 * torch.randn(size, generator=generator))
        if form.norm is None:
            last_norm(self.second).load_state_dict(last_norm(self.model).state_dict())
        if edit is not None:
            edit(self)
        self._save(entry, folder, config.num_hidden_layers)
        self.folder = folder

    def _save(self, entry: MTPEntry, folder: Path, num_layers: int) -> None:
        form, zoo = entry.form, ZOO[entry.model]
        tensors = self._tensors_of(self.model, folder)
        path = folder / "config.json"
        values = json.loads(path.read_text())
        if zoo.edit_config is not None:
            zoo.edit_config(values)
        (values.get("text_config") or values).update(entry.config)
        if "architectures" in entry.config:
            values.update(entry.config)
        path.write_text(json.dumps(values))
        if zoo.edit_tensors is not None:
            tensors = {name: t for name, t in zoo.edit_tensors(tensors).items() if not name.startswith("mtp.")}
        with tempfile.TemporaryDirectory() as scratch:
            for name, tensor in self._tensors_of(self.second, Path(scratch)).items():
                if match := _OF_LAYER.match(name):
                    number = num_layers if form.layer.startswith("model.") else match[1]
                    tensors[f"{form.layer.format(layer=number)}{name.removeprefix(match[0])}"] = tensor
                elif _LAST_NORM.fullmatch(name) and form.norm is not None:
                    tensors[f"{form.norm.format(layer=num_layers)}.weight"] = tensor
        for module, tensor in (
            (form.embedding_norm, self.embedding_norm.weight),
            (form.hidden_norm, self.hidden_norm.weight),
            (form.projection, self.projection),
        ):
            tensors[f"{module.format(layer=num_layers)}.weight"] = tensor.detach().clone()
        for copy in form.copies:  # with other values: they are not read
            tensors[copy.format(layer=num_layers)] = torch.full_like(self.model.lm_head.weight, 3.0)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        make_tokenizer(folder)

    @staticmethod
    def _tensors_of(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
        model.save_pretrained(folder)
        return load_file(folder / "model.safetensors")

    # ------------------------------------------------------------------------------------------------------- reference

    @torch.no_grad()
    def drafts_at(self, tokens: list[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the first and of the second draft token after `length` tokens, float32 [vocab_size] each.

        The second is that after the most likely first.
        """
        ids = torch.tensor([tokens[:length]])
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
        inputs = self._inputs(ids[0, 1:], hidden)
        states = self._run(inputs)
        first = self.model.lm_head(states[-1])
        again = self._inputs(first.argmax()[None], states[-1:])
        return first, self.model.lm_head(self._run(torch.cat((inputs, again)))[-1])

    @torch.no_grad()
    def greedy_after(self, tokens: list[int], length: int) -> list[int]:
        """The model's most likely token after the first `length` tokens, and after each further one but the last."""
        hidden = self.model.model(input_ids=torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state
        found: list[int] = self.model.lm_head(hidden[0, length - 1 :]).argmax(dim=-1).tolist()
        return found

    def _inputs(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        parts = [self.embedding_norm(self.model.get_input_embeddings()(ids)), self.hidden_norm(hidden)]
        return nn.functional.linear(torch.cat(parts[:: -1 if self.form.hidden_first else 1], dim=-1), self.projection)

    def _run(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second.model(inputs_embeds=inputs[None], use_cache=False).last_hidden_state[0]
        return found


def predict_from_the_last_token(reference: MTPReference, noise: float = 0.0) -> None:
    """Scales down what layers add to the residual stream. By default they add nothing: model and module both predict
    from the last token alone."""
    with torch.no_grad():
        for name, parameter in (*reference.model.named_parameters(), *reference.second.named_parameters()):
            if name.endswith(("o_proj.weight", "out_proj.weight")) or "down_proj" in name:
                parameter *= noise
        last_norm(reference.second).load_state_dict(last_norm(reference.model).state_dict())
        size, order = reference.projection.shape[0], -1 if reference.form.hidden_first else 1
        parts = [torch.eye(size), torch.zeros(size, size)][::order]
        reference.projection.copy_(torch.cat(parts, dim=1) + noise * reference.projection)
        default = type(reference.embedding_norm)(size).weight
        reference.embedding_norm.weight.copy_(default)


def nearly_agree(reference: MTPReference) -> None:
    """Model and module often predict the same token."""
    predict_from_the_last_token(reference, 0.05)


def load_head(folder: Path, ctx: BuildContext | None = None) -> MTPHead:
    """The module of a checkpoint as the engine loads it."""
    config = read_config(folder)
    ctx = dataclasses.replace(ctx or make_context(), quantization=quantization_method(config))
    module, _, name = mtp_heads(config)[0].head.partition(":")
    head: MTPHead = getattr(importlib.import_module(module), name)(config, ctx)
    load_weights(head, folder, use_tqdm=False)
    head.after_load()
    return head
