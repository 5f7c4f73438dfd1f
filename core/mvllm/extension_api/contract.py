"""For packages that add to the contract of platforms, or read it: the marks of phases, and the entry points' group.

Importing it loads neither torch nor a device library.
"""

from mvllm.contract import ANY as ANY
from mvllm.contract import ANY_PROCESS as ANY_PROCESS
from mvllm.contract import Phase as Phase
from mvllm.contract import phase as phase
from mvllm.platform.spec import ENTRY_POINT_GROUP as ENTRY_POINT_GROUP
from mvllm.platform.step_graph import substitute as substitute

__all__ = ["ANY", "ANY_PROCESS", "ENTRY_POINT_GROUP", "Phase", "phase", "substitute"]
