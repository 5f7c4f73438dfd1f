"""Options that other engines' servers have and `mvllm serve` does without.

An option that would open, close or encrypt the server is refused: a server that ignores it is not what was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping

from mvllm.extension_api.foreign_keywords import ForeignKeyword


def _flag(instead: str, same: tuple[object, ...] = (), *, is_refused: bool = False) -> ForeignKeyword:
    return ForeignKeyword(instead, same, kind="flag", is_refused=is_refused)


_TLS = "The server speaks HTTP. End TLS in a proxy before it, as docs/how-to/deploy-a-server.md shows."
_LIMITS = "Heads of requests have limits of their own; see docs/how-to/deploy-a-server.md."
_ENTRY_POINTS = "Parsers of other packages are entry points, and are found by name; see docs/how-to/extending.md."
_CONTENT = "Prompts and outputs are never logged."
_REPLICAS = "Engine cores are processes of this machine, and /health reports on all of them."
_COHERE = "There is no API of Cohere but /rerank."
_FINGERPRINT = "Responses name no build of the engine."

FOREIGN_SERVER_OPTIONS: Mapping[str, ForeignKeyword] = {
    # transport and access
    "ssl_keyfile": ForeignKeyword(_TLS, is_refused=True),
    "ssl_certfile": ForeignKeyword(_TLS, is_refused=True),
    "ssl_ca_certs": ForeignKeyword(_TLS, is_refused=True),
    "ssl_cert_reqs": ForeignKeyword(_TLS, (0,), is_refused=True),
    "ssl_ciphers": ForeignKeyword(_TLS, is_refused=True),
    "enable_ssl_refresh": _flag(_TLS, is_refused=True),
    "middleware": ForeignKeyword(
        "Middleware is not loaded. Routes of other packages are added with --http-plugins.",
        kind="list",
        is_refused=True,
    ),
    "headless": _flag(f"{_REPLICAS} With several machines, use --distributed-executor-backend ray.", is_refused=True),
    "grpc": _flag("The server speaks HTTP.", is_refused=True),
    "grpc_port": ForeignKeyword("The server speaks HTTP.", is_refused=True),
    "tokens_only": _flag("Every route of the model is served.", is_refused=True),
    "skip_tokenizer_init": _flag("The server turns texts into token ids.", is_refused=True),
    "allow_credentials": _flag("Keys are sent in headers, not in cookies."),
    "allowed_methods": ForeignKeyword("Pages may use GET, POST and DELETE.", (["*"],)),
    "allowed_headers": ForeignKeyword("Pages may send every header.", (["*"],)),
    "root_path": ForeignKeyword("Paths begin at the root; the proxy removes its prefix."),
    "h11_max_incomplete_event_size": ForeignKeyword(_LIMITS),
    "h11_max_header_count": ForeignKeyword(_LIMITS),
    "trust_request_mm_kwargs": _flag("Requests may set the sizes of images within the limits.", (True,)),
    # replicas
    "data_parallel_supervisor_port": ForeignKeyword(_REPLICAS),
    "dp_supervisor_probe_interval_s": ForeignKeyword(_REPLICAS),
    "dp_supervisor_probe_timeout_s": ForeignKeyword(_REPLICAS),
    "dp_supervisor_probe_failure_threshold": ForeignKeyword(_REPLICAS),
    "enable_scale_out": _flag("Prompts are rendered by the server that runs them."),
    "enable_flash_late_interaction": _flag("MaxSim is computed by the front end.", (True,)),
    # requests and responses
    "chat_template_content_format": ForeignKeyword("The template decides the form of contents.", ("auto",)),
    "response_role": ForeignKeyword("Replies have the role 'assistant'.", ("assistant",)),
    "reasoning_effort_map": ForeignKeyword("The effort of a request reaches the template as it is.", ({},)),
    "anthropic_disabled_thinking_effort": ForeignKeyword(
        "Templates that can turn thoughts off are told so.", ("auto",)
    ),
    "tool_strict_level": ForeignKeyword("`strict` of a tool and tool_choice decide.", ("auto",)),
    "exclude_tools_when_tool_choice_none": _flag("Leave tools out of the request instead."),
    "enable_auto_tool_choice": _flag("", (True,)),
    "tool_parser_plugin": ForeignKeyword(_ENTRY_POINTS, ("",)),
    "tool_server": ForeignKeyword("Name tool servers with --mcp-server."),
    "return_tokens_as_token_ids": _flag("Requests have a field of this name."),
    "sse_keep_alive_interval": ForeignKeyword("Streams are silent between tokens.", (0,)),
    "enable_prompt_tokens_details": _flag("", (True,)),
    "enable_request_id_headers": _flag("", (True,)),
    "enable_tokenizer_info_endpoint": _flag("", (True,)),
    "fingerprint_mode": ForeignKeyword(_FINGERPRINT, ("none",)),
    "fingerprint_value": ForeignKeyword(_FINGERPRINT),
    "cohere_format": ForeignKeyword(_COHERE),
    "cohere_is_reasoning_model": _flag(_COHERE, (True,)),
    # logs and metrics
    "uvicorn_log_level": ForeignKeyword("The variable MVLLM_LOGGING_LEVEL sets the level of the log.", ("info",)),
    "disable_access_log_for_endpoints": ForeignKeyword("--no-access-log turns the lines of all paths off."),
    "enable_log_outputs": _flag(_CONTENT),
    "enable_log_deltas": _flag(_CONTENT, (True,)),
    "log_error_stack": _flag("Errors of the server are logged with their traceback.", (True,)),
    "enable_per_request_metrics": _flag("/metrics has the times of all requests."),
    "enable_server_load_tracking": _flag("/metrics has the number of running requests.", (True,)),
    "enable_offline_docs": _flag("/docs needs no network.", (True,)),
}
"""Options by name, as in `FOREIGN_KEYWORDS`."""
