"""Settings of servers with stored responses."""

from __future__ import annotations

from typing import Any

import msgspec

from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm_responses.settings import NAME, ResponsesSettings


def server_settings(settings: ResponsesSettings, **of_server: Any) -> ServerSettings:
    """The settings of a server, with those of the plugin."""
    return ServerSettings(**of_server, plugin_settings={NAME: msgspec.to_builtins(settings)})
