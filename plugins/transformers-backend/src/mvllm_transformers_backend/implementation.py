"""The model implementation `transformers`: what core asks before it builds a model. Imports no torch."""

from __future__ import annotations

from mvllm.extension_api import HFConfig
from mvllm.extension_api.model_implementations import CompositeConfig, ModelImplementation
from mvllm_transformers_backend import composite_config, supported_classes


class TransformersImplementation(ModelImplementation):
    """Runs architectures of which transformers has a causal language model, alone or with encoders."""

    items = "mvllm_transformers_backend.items:ItemsOfTransformers"

    def unsupported_reason(self, architecture: str) -> str | None:
        return supported_classes.unsupported_reason(architecture)

    def model_class(self, architecture: str) -> str:
        if supported_classes.has_encoders(architecture):
            return "mvllm_transformers_backend.multimodal:TransformersMultiModalForCausalLM"
        return "mvllm_transformers_backend.model:TransformersForCausalLM"

    def read_composite_config(self, whole: HFConfig) -> CompositeConfig | None:
        return composite_config.read_composite_config(whole)
