"""For packages that run architectures without a class of their own (entry points of `mvllm.model_impls`).

An implementation is a subclass of `ModelImplementation`. `mvllm-transformers-backend` is one.
docs/how-to/extending.md shows the whole. Importing this loads no torch.
"""

from mvllm.config.families import is_native as is_native
from mvllm.config.model_implementations import CompositeConfig as CompositeConfig
from mvllm.config.model_implementations import ModelImplementation as ModelImplementation

__all__ = ["CompositeConfig", "ModelImplementation", "is_native"]
