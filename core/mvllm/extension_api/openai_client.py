"""For packages that send requests to an OpenAI-compatible server with an HTTP client of their own."""

from __future__ import annotations

from mvllm.entrypoints.event_loop import run_in_event_loop as run_in_event_loop
from mvllm.entrypoints.openai_client import API_KEY_VARIABLE as API_KEY_VARIABLE
from mvllm.entrypoints.openai_client import DONE as DONE
from mvllm.entrypoints.openai_client import authorization_headers as authorization_headers
from mvllm.entrypoints.openai_client import error_message as error_message
from mvllm.entrypoints.openai_client import error_text as error_text
from mvllm.entrypoints.openai_client import event_data as event_data
from mvllm.entrypoints.openai_client import first_model_id as first_model_id
from mvllm.entrypoints.openai_client import join_url as join_url
from mvllm.entrypoints.openai_client import shorten as shorten
from mvllm.entrypoints.openai_client import split_lines as split_lines

__all__ = [
    "API_KEY_VARIABLE",
    "DONE",
    "authorization_headers",
    "error_message",
    "error_text",
    "event_data",
    "first_model_id",
    "join_url",
    "run_in_event_loop",
    "shorten",
    "split_lines",
]
