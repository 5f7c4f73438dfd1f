"""The settings of the HTTP server, beside the engine's arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from mvllm.entrypoints.openai.server.authentication import KeyLimits

DEFAULT_PORT = 8000
S = TypeVar("S", bound=msgspec.Struct)

UnknownFieldsPolicy = Literal["warn", "refuse", "ignore"]
"""What the server does with request fields that it does not know."""


@dataclass(frozen=True)
class ServerSettings:
    """The server's settings.

    Attributes:
        host, port: Address to listen on; port 0 chooses a free one.
        uds: Path of a Unix domain socket to listen on instead.
        api_keys: Keys for everything except administration; without any, no key is needed.
        admin_api_keys: Keys for everything; without any, administration is closed.
        router_key: An administrator's key of the router that this server belongs to, for the router's own requests.
        key_limits: What each user key may use, and all requests together where the server has no keys.
        limits_of_keys: The limits of user keys that have others.
        served_model_names: Names of the model in requests; by default the name it was started with.
        chat_template: Template in place of the tokenizer's own.
        default_chat_template_kwargs: Variables of the template for requests that do not set them.
        trust_request_chat_template: Whether requests may send a template.
        force_include_usage: Whether every stream ends with the usage.
        tool_call_parser: Name of the parser of tool calls; `auto` detects it from the chat template, `none` is none.
        reasoning_parser: Name of the parser of reasoning; `auto` and `none` likewise.
        allowed_origins: Origins whose pages may send requests from a browser (CORS).
        allowed_hosts: Further names of the server in the header Host, where it has no API keys; see `BrowserCheck`.
        max_body_bytes: Longest request body.
        unknown_fields: What to do with unknown request fields: `warn` in the log and in the response header
            `x-mvllm-unknown-fields`, `refuse` the request, or `ignore` them.
        body_timeout: Seconds until the next part of a body must have arrived.
        send_timeout: Seconds for which a client may leave a full send buffer unread.
        heartbeat_timeout: Seconds without a heartbeat of the engine after which the server is unhealthy.
        api_server_timeout: Seconds without a heartbeat after which one of several API servers, or their coordinator,
            counts as hung, and the server ends; 0 for never.
        shutdown_timeout: Seconds for running requests to finish after SIGTERM.
        access_log: Whether to log a line for each response.
        metrics_prefixes: Beginnings of metric names; with several, each metric has several names.
        otlp_traces_endpoint: URL of the OpenTelemetry collector; None for no tracing.
        http_plugins: Names of plugins whose routes are added under `/plugins/<name>`, and of those with routes at the
            root without which the server must not start.
        disabled_http_plugins: Names of plugins with routes at the root that are not used.
        plugin_settings: The settings of plugins with routes at the root, by name, as plain values.
        lora_modules: Names and folders of the LoRA adapters to load at the start.
        runtime_lora_loading: Whether administrators may load and unload adapters.
        docs: Whether to serve `/docs`, `/openapi.json` and the playground at `/`.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    uds: str | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_api_keys: tuple[str, ...] = field(default=(), repr=False)
    router_key: str | None = field(default=None, repr=False)
    key_limits: KeyLimits = field(default_factory=KeyLimits)
    limits_of_keys: dict[str, KeyLimits] = field(default_factory=dict, repr=False)
    served_model_names: tuple[str, ...] = ()
    chat_template: str | None = None
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False
    force_include_usage: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 64 << 20
    unknown_fields: UnknownFieldsPolicy = "warn"
    body_timeout: float = 30.0
    send_timeout: float = 60.0
    heartbeat_timeout: float = 60.0
    api_server_timeout: float = 60.0
    shutdown_timeout: float = 30.0
    access_log: bool = True
    metrics_prefixes: tuple[str, ...] = ("mvllm:",)
    otlp_traces_endpoint: str | None = None
    http_plugins: tuple[str, ...] = ()
    disabled_http_plugins: tuple[str, ...] = ()
    plugin_settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    lora_modules: tuple[tuple[str, str], ...] = ()
    runtime_lora_loading: bool = True
    docs: bool = True

    def of_plugin(self, name: str, kind: type[S]) -> S:
        """The settings of a plugin with routes at the root.

        Args:
            name: The plugin's name.
            kind: Their struct. Without settings, its fields have their defaults.
        """
        return msgspec.convert(self.plugin_settings.get(name, {}), kind)

    @property
    def limits_by_key(self) -> dict[str, KeyLimits] | None:
        """The limits of each user key; None if nothing is limited."""
        if self.key_limits == KeyLimits() and not self.limits_of_keys:
            return None
        return {key: self.limits_of_keys.get(key, self.key_limits) for key in self.api_keys}
