"""For tests of graph compilers: tracing a model by hand, arrays of graphs, and graphs of tensor-parallel ranks."""

from mvllm_graph.arrays import to_numpy as to_numpy
from mvllm_graph.arrays import to_torch as to_torch
from mvllm_graph.parts import COLLECTIVES as COLLECTIVES
from mvllm_graph.parts import distinct_inputs as distinct_inputs
from mvllm_graph.recorded_calls import RecordedAttention as RecordedAttention
from mvllm_graph.recorded_calls import RecordedGroup as RecordedGroup
from mvllm_graph.recorded_calls import recording_providers as recording_providers
from mvllm_graph.run_parts import run_parts as run_parts
from mvllm_graph.trace import HEAD as HEAD
from mvllm_graph.trace import MODEL as MODEL
from mvllm_graph.trace import TracedModel as TracedModel
from mvllm_graph.trace import trace_model as trace_model

__all__ = [
    "COLLECTIVES",
    "HEAD",
    "MODEL",
    "RecordedAttention",
    "RecordedGroup",
    "TracedModel",
    "distinct_inputs",
    "recording_providers",
    "run_parts",
    "to_numpy",
    "to_torch",
    "trace_model",
]
