"""For packages with models like core's, or that build models and load their weights themselves."""

from mvllm.layers.activation import activation as activation
from mvllm.layers.quantization.registry import quantization_method as quantization_method
from mvllm.models.llama import LayerNorms as LayerNorms
from mvllm.models.llama import LlamaAttention as LlamaAttention
from mvllm.models.llama import LlamaForCausalLM as LlamaForCausalLM
from mvllm.models.llama import LlamaLayer as LlamaLayer
from mvllm.models.llama import LlamaOptions as LlamaOptions
from mvllm.models.registry import resolve_model_class as resolve_model_class
from mvllm.models.weight_loader import load_weights as load_weights
from mvllm.models.weight_update import ModelWeightUpdate as ModelWeightUpdate
from mvllm.models.weight_update import allocate as allocate
from mvllm.models.weight_update import drop_attributes as drop_attributes
from mvllm.models.weight_update import same_structure as same_structure
from mvllm.ops.all_schemas import SCHEMAS as SCHEMAS
from mvllm.ops.dtypes import dtype_name as dtype_name
from mvllm.ops.dtypes import torch_dtype as torch_dtype
from mvllm.ops.registry import OpTable as OpTable

__all__ = [
    "LayerNorms",
    "LlamaAttention",
    "LlamaForCausalLM",
    "LlamaLayer",
    "LlamaOptions",
    "ModelWeightUpdate",
    "OpTable",
    "SCHEMAS",
    "activation",
    "allocate",
    "drop_attributes",
    "dtype_name",
    "load_weights",
    "quantization_method",
    "resolve_model_class",
    "same_structure",
    "torch_dtype",
]
