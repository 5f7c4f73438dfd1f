"""For packages that add to the contract of platforms: the marks of phases, and how the contract is read from source.

Importing it loads neither torch nor a device library.
"""

from mvllm.contract import ANY as ANY
from mvllm.contract import Phase as Phase
from mvllm.contract import phase as phase
from mvllm.platform.contract_operations import Operation as Operation
from mvllm.platform.contract_surface import REFUSED as REFUSED
from mvllm.platform.contract_surface import TRACED as TRACED
from mvllm.platform.contract_surface import UNUSED as UNUSED
from mvllm.platform.contract_surface import GraphContractOperation as GraphContractOperation
from mvllm.platform.source_parsing import function_parameters as function_parameters
from mvllm.platform.source_parsing import parse_module as parse_module
from mvllm.platform.step_graph import substitute as substitute

__all__ = [
    "ANY",
    "GraphContractOperation",
    "Operation",
    "Phase",
    "REFUSED",
    "TRACED",
    "UNUSED",
    "function_parameters",
    "parse_module",
    "phase",
    "substitute",
]
