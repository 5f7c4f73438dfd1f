"""For packages with parsers of tool calls and reasoning (`mvllm.tool_parsers`, `mvllm.reasoning_parsers`).

It has the interface, the incremental scanners that parsers share, and the rules by which a chat template shows a format
(`mvllm.parser_rules`).
"""

from __future__ import annotations

from mvllm.entrypoints.parsers.hermes import HermesToolParser as HermesToolParser
from mvllm.entrypoints.parsers.interface import CallSyntax as CallSyntax
from mvllm.entrypoints.parsers.interface import ContentDelta as ContentDelta
from mvllm.entrypoints.parsers.interface import Delta as Delta
from mvllm.entrypoints.parsers.interface import ReasoningDelta as ReasoningDelta
from mvllm.entrypoints.parsers.interface import ReasoningParser as ReasoningParser
from mvllm.entrypoints.parsers.interface import ReasoningStream as ReasoningStream
from mvllm.entrypoints.parsers.interface import ToolCallDelta as ToolCallDelta
from mvllm.entrypoints.parsers.interface import ToolParser as ToolParser
from mvllm.entrypoints.parsers.interface import ToolStream as ToolStream
from mvllm.entrypoints.parsers.interface import make_call_id as make_call_id
from mvllm.entrypoints.parsers.json_stream import OPENING as OPENING
from mvllm.entrypoints.parsers.json_stream import JsonValueReader as JsonValueReader
from mvllm.entrypoints.parsers.marked_calls import MarkedCalls as MarkedCalls
from mvllm.entrypoints.parsers.marked_calls import merge_adjacent as merge_adjacent
from mvllm.entrypoints.parsers.markers import compile_markers as compile_markers
from mvllm.entrypoints.parsers.markers import is_partial_marker as is_partial_marker
from mvllm.entrypoints.parsers.markers import is_tag as is_tag
from mvllm.entrypoints.parsers.markers import partial_marker_length as partial_marker_length
from mvllm.entrypoints.parsers.parser_rules import DetectionRule as DetectionRule
from mvllm.entrypoints.parsers.parser_rules import ParserRules as ParserRules
from mvllm.entrypoints.parsers.tagged_reasoning import TaggedReasoning as TaggedReasoning
from mvllm.entrypoints.parsers.tagged_reasoning import TaggedReasoningParser as TaggedReasoningParser
from mvllm.entrypoints.parsers.tagged_reasoning import ThinkTagParser as ThinkTagParser
from mvllm.entrypoints.parsers.tool_call_reader import NOT_SPACE as NOT_SPACE
from mvllm.entrypoints.parsers.tool_call_reader import CallReader as CallReader
from mvllm.entrypoints.parsers.tool_call_reader import ToolCallReader as ToolCallReader

__all__ = [
    "NOT_SPACE",
    "OPENING",
    "CallReader",
    "CallSyntax",
    "ContentDelta",
    "Delta",
    "DetectionRule",
    "HermesToolParser",
    "JsonValueReader",
    "MarkedCalls",
    "ParserRules",
    "ReasoningDelta",
    "ReasoningParser",
    "ReasoningStream",
    "TaggedReasoning",
    "TaggedReasoningParser",
    "ThinkTagParser",
    "ToolCallDelta",
    "ToolCallReader",
    "ToolParser",
    "ToolStream",
    "compile_markers",
    "is_partial_marker",
    "is_tag",
    "make_call_id",
    "merge_adjacent",
    "partial_marker_length",
]
