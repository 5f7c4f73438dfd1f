"""What the server can be told, beside what the engine can."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DEFAULT_PORT = 8000

UnknownFieldsPolicy = Literal["warn", "refuse", "ignore"]
"""What is done about fields of a request that the server does not know."""


@dataclass(frozen=True)
class ServerSettings:
    """The server's settings.

    Attributes:
        host, port: Where it listens; port 0 takes a free one.
        uds: Path of a Unix domain socket to listen on instead.
        api_keys: Of whom it answers everything but administration; empty for everybody.
        admin_api_keys: Of whom it answers everything; empty for nobody.
        served_model_names: Names of the model in requests; empty for the name it was started with.
        chat_template: Template in place of the tokenizer's own.
        trust_request_chat_template: Whether requests may bring a template.
        tool_call_parser: Name of what finds calls of tools in answers; `auto` chooses it from the chat template where
            that shows the model's format, `none` is none.
        reasoning_parser: Name of what finds thoughts in answers; `auto` and `none` as before.
        allowed_origins: Origins whose pages may send requests from a browser.
        max_body_bytes: Longest body of a request.
        unknown_fields: What is done about fields of a request that the server does not know: `warn` in the log and in
            the header `x-mvllm-unknown-fields` of the response, `refuse` the request, or `ignore` them.
        body_timeout: Seconds that the next piece of a body may take.
        send_timeout: Seconds that a client may leave a full buffer unread.
        heartbeat_timeout: Seconds without a sign of life after which the engine is taken for hung.
        api_server_timeout: Seconds without a sign of life after which one of several API servers, or their coordinator,
            is taken for hung, and the server ends; 0 for never.
        shutdown_timeout: Seconds that requests under way get after SIGTERM.
        access_log: Whether each answer gets a line in the log.
        metrics_prefixes: What names of metrics begin with; with several, each is shown under all.
        otlp_traces_endpoint: URL of the collector that gets spans of requests; None for none.
        max_stored_responses: Responses of `/v1/responses` that are kept to be asked for and gone on with; 0 for none.
        max_stored_bytes: How many bytes they may take together.
        http_plugins: Names of plugins whose routes are added, under `/plugins/<name>`.
        lora_modules: Names and folders of the LoRA adapters to offer from the start on.
        runtime_lora_loading: Whether administrators may load and unload adapters.
        docs: Whether there are `/docs`, `/openapi.json` and the page at `/`.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    uds: str | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_api_keys: tuple[str, ...] = field(default=(), repr=False)
    served_model_names: tuple[str, ...] = ()
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    allowed_origins: tuple[str, ...] = ()
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
    max_stored_responses: int = 1000
    max_stored_bytes: int = 64 << 20
    http_plugins: tuple[str, ...] = ()
    lora_modules: tuple[tuple[str, str], ...] = ()
    runtime_lora_loading: bool = True
    docs: bool = True
