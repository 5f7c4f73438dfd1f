"""MetaMultiModalModel: a transformers model with encoders on the meta device, checked before any weight is read.

    causal ─┬─ base ─┬─ encoders, projectors         MultiModalModel.by_transformers: they stay in `base`
            │        └─ language model               `layers`: run here, with paged attention
            └─ head

The language model is called directly, so what transformers' class passes to it must be what core passes: the embeddings
of tokens, with those of items in their places. A call of `base` with LanguageModelStub in place of the language model
shows whether the class passes more: other masks, other positions, or features for single layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from mvllm.extension_api import HFConfig, ModelConfig
from mvllm.extension_api.layers import GroupCoordinator
from mvllm_transformers_backend.dry_run import NAME
from mvllm_transformers_backend.meta_model import MetaModel, set_module
from mvllm_transformers_backend.replacement_modules import LanguageModelStub

_NUM_TOKENS = 7


class MetaMultiModalModel(MetaModel):
    """A transformers model with encoders.

    Args:
        config, dtype, tp: As for MetaModel.

    Attributes:
        encoders: transformers' model of encoders and language model, with `stub` in place of the latter.
        encoders_name: Its module name.
        stub: Records what the language model would be called with.

    Raises:
        ModelError, ConfigError: As MetaModel, or its language model needs more than embeddings of tokens and items.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, tp: GroupCoordinator) -> None:
        super().__init__(config, dtype, tp)
        if config.multimodal is not None and config.hf_config.get("has_lora_adapter"):  # Granite Speech
            raise self.refusal("its checkpoint has an adapter that applies only to prompts with items")
        self.stub = LanguageModelStub(config.hidden_size, dtype)
        set_module(self.encoders, self.layers_name.removeprefix(f"{self.encoders_name}."), self.stub)
        self._check_call()

    def _config_values(self) -> dict[str, Any]:
        """config.json as it is in the file, with the values that ModelConfig has, which include the user's."""
        flat = self._config.hf_config.as_dict()
        whole = HFConfig.load(self._config.path).as_dict()
        of_text: dict[str, Any] = whole.get("text_config") or {}
        added = {key: value for key, value in flat.items() if key not in whole and key not in of_text}
        outer = {key: flat[key] if key in flat and key not in of_text else value for key, value in whole.items()}
        return {**outer, "text_config": {**of_text, **{key: flat[key] for key in of_text if key in flat}, **added}}

    def _attention_setting(self, config: Any) -> str | dict[str, str]:
        """The encoders' attention is transformers' own."""
        return {"text_config": NAME}

    def _language_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self.causal.named_modules():
            if _is_within(name, self.layers_name) or not _is_within(name, self.encoders_name):
                yield name, module

    def _find_language_model(self) -> str:
        self.encoders_name = self._read_by_head
        if not self.encoders_name:
            return ""
        self.encoders: Any = self.causal.get_submodule(self.encoders_name)
        language_model = self.encoders.get_decoder()
        names = {id(module): name for name, module in self.causal.named_modules()}
        name = names.get(id(language_model), "")
        return name if name.startswith(f"{self.encoders_name}.") else ""

    def _check_call(self) -> None:
        """Calls `encoders` for text, and checks what the language model is given."""
        ids = torch.zeros((1, _NUM_TOKENS), dtype=torch.int64, device="meta")
        ones = torch.ones((1, _NUM_TOKENS), dtype=torch.int64, device="meta")
        try:
            with torch.inference_mode():
                self.encoders(input_ids=ids, attention_mask=ones, use_cache=False)
        except Exception as e:
            raise self.refusal(f"a run of its encoders' class without data fails ({type(e).__name__}: {e})") from e
        given, multimodal = self.stub.arguments, self._config.multimodal
        unknown = self.stub.unknown_arguments()
        if multimodal is None:  # None for text, and something with items
            unknown = {name: value for name, value in unknown.items() if value is not None}
        if unknown:
            raise self.refusal(f"it gives its language model more than embeddings ({', '.join(unknown)})")
        if given.get("inputs_embeds") is not self.stub.embed_tokens.result:
            raise self.refusal("it changes the embeddings of tokens outside of its language model")
        sees_both_ways = multimodal is not None and multimodal.spans_attend_both_ways
        if given.get("attention_mask") is not ones and not sees_both_ways:
            raise self.refusal("it makes attention masks of its own, for instance for tokens that attend to later ones")
        has_grids = multimodal is not None and multimodal.rope_sections is not None
        counts_itself = given.get("position_ids") is not None or hasattr(self.encoders, "get_rope_index")
        if counts_itself and not has_grids and multimodal is not None:
            raise self.refusal("it gives the tokens of items positions of its own")


def _is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")
