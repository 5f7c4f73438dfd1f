"""Command lines written for `vllm serve` start `mvllm serve`, with the effect that they ask for or a line that says why
not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from mvllm.entrypoints.cli import serve
from mvllm.entrypoints.cli.main import _make_parser
from mvllm.entrypoints.cli.option_spellings import SHORT_OPTIONS, as_declared
from mvllm.errors import ConfigError
from mvllm_compat.foreign_keywords import FOREIGN_KEYWORDS, FOREIGN_SERVER_OPTIONS
from tests.unit.entrypoints.test_config_file import parse
from tests.unit.entrypoints.test_option_spellings import engine, server

OPTIONS = """
additional-config aggregate-engine-logging all2all-backend allow-credentials allow-deprecated-quantization
allowed-headers allowed-local-media-path allowed-media-domains allowed-methods allowed-origins
anthropic-disabled-thinking-effort api-key api-server-count async-scheduling attention-backend attention-config
aux-output-config block-size chat-template chat-template-content-format code-revision cohere-format
cohere-is-reasoning-model collect-detailed-traces compilation-config config config-format convert
cp-kv-cache-interleave-size cpu-distributed-timeout-seconds cpu-offload-gb cpu-offload-params
cudagraph-capture-sizes cudagraph-metrics custom-histogram-buckets data-parallel-address data-parallel-backend
data-parallel-external-lb data-parallel-hybrid-lb data-parallel-multi-port-external-lb data-parallel-rank
data-parallel-rpc-port data-parallel-size data-parallel-size-local data-parallel-start-rank
data-parallel-supervisor-port dbo-decode-token-threshold dbo-prefill-token-threshold dcp-comm-backend
dcp-kv-cache-interleave-size dcp-q-replicate decode-context-parallel-size default-chat-template-kwargs
default-mm-loras device-ids device-memory-utilization diffusion-config disable-access-log-for-endpoints
disable-cascade-attn disable-chunked-mm-input disable-custom-all-reduce disable-fastapi-docs
disable-hybrid-kv-cache-manager disable-log-stats disable-nccl-for-dp-synchronization disable-sliding-window
disable-uvicorn-access-log distributed-executor-backend distributed-timeout-seconds download-dir
dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s
dp-sync-interval dtype ec-manager-config ec-transfer-config elastic-ep-max-dp-size enable-auto-tool-choice
enable-batch-sharded-sampling enable-chunked-prefill enable-cumem-allocator enable-dbo enable-elastic-ep
enable-ep-weight-filter enable-eplb enable-expert-parallel enable-fault-tolerance enable-flash-late-interaction
enable-flashinfer-autotune enable-force-include-usage enable-hc-sp enable-layerwise-nvtx-tracing
enable-log-deltas enable-log-outputs enable-log-requests enable-logging-iteration-details enable-lora
enable-mamba-cache-stochastic-rounding enable-mamba-shared-prefix-checkpoint enable-mfu-metrics
enable-mixed-moe-lora-format enable-mm-embeds enable-moe-shared-loras enable-nccl-comm-suspend
enable-offline-docs enable-per-request-metrics enable-prefix-caching enable-prompt-embeds
enable-prompt-tokens-details enable-request-id-headers enable-return-routed-experts enable-scale-out
enable-server-load-tracking enable-shm-tensor-arena enable-sleep-mode enable-ssl-refresh
enable-tokenizer-info-endpoint enable-tower-connector-lora enable-trace-replay enforce-eager engram-config
eplb-config exclude-tools-when-tool-choice-none expert-placement-strategy fail-on-environ-validation
fault-tolerance-config fingerprint-mode fingerprint-value fully-sharded-loras gdn-prefill-backend
generation-config gpu-memory-utilization grpc grpc-port h11-max-header-count h11-max-incomplete-event-size
headless hf-config-path hf-overrides hf-token host ignore-patterns interleave-mm-strings io-processor-plugin
ir-op-priority jit-monitor-mode jit-monitor-verbose kda-decode-backend kda-prefill-backend kernel-config
kv-cache-dtype kv-cache-dtype-skip-layers kv-cache-memory-bytes kv-cache-metrics kv-cache-metrics-sample
kv-events-config kv-offloading-backend kv-offloading-size kv-sharing-fast-prefill kv-transfer-config
language-model-only limit-mm-per-prompt linear-backend load-format log-config-file log-error-stack log-level
logging-config logits-processors logprobs-mode long-prefill-token-threshold
long-prefill-token-threshold-adaptive lora-dtype lora-modules lora-target-modules mamba-backend mamba-block-size
mamba-cache-dtype mamba-cache-mode mamba-cache-philox-rounds mamba-ssm-cache-dtype mamba-ssu-algorithm
master-addr master-port max-cpu-loras max-cudagraph-capture-size max-log-len max-logprobs max-lora-cls-labels
max-lora-rank max-loras max-model-len max-num-active-seqs max-num-batched-tokens max-num-queued-reqs
max-num-queued-tokens max-num-scheduled-tokens max-num-seqs max-parallel-loading-workers media-io-kwargs
middleware mm-device-do-normalize mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-fp8-scale-path
mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path mm-encoder-only mm-encoder-tp-mode
mm-hasher-algorithm mm-ipc-gpu-memory-gb mm-processor-cache-gb mm-processor-cache-type mm-processor-device
mm-processor-kwargs mm-shm-cache-max-object-size-mb mm-tensor-ipc model model-class-overrides model-impl
model-loader-extra-config moe-backend monokernel nnodes node-rank num-gpu-blocks-override numa-bind
numa-bind-cpus numa-bind-nodes offload-backend offload-group-size offload-num-in-group offload-params
offload-prefetch-step optimization-level otlp-traces-endpoint override-generation-config
per-request-spec-decode-metrics performance-mode pipeline-parallel-size pooler-config port
prefill-context-parallel-size prefill-schedule-interval prefix-cache-retention-interval prefix-caching-hash-algo
prefix-match-unit profiler-config pt-load-map-location quantization quantization-config ray-workers-use-nsight
reasoning-config reasoning-effort-map reasoning-parser reasoning-parser-plugin renderer-num-workers
replayssm-buffer-len response-role return-sampling-mask return-tokens-as-token-ids revision root-path runner
safetensors-load-strategy safetensors-prefetch-block-size safetensors-prefetch-num-threads scheduler-cls
scheduler-reserve-full-isl scheduling-policy seed served-model-name show-hidden-metrics-for-version
shutdown-timeout skip-mm-profiling skip-tokenizer-init sleep-mode-backend sleep-mode-offload-cudagraph
sleep-preserve-parameter-names sparse-indexer-topk-backend spec-method spec-model spec-tokens
specialize-active-lora speculative-config sse-keep-alive-interval ssl-ca-certs ssl-cert-reqs ssl-certfile
ssl-ciphers ssl-keyfile stream-interval structured-outputs-config swa-bounded-replay tensor-parallel-size
tokenizer tokenizer-mode tokenizer-revision tokens-only tool-call-parser tool-parser-plugin tool-server
tool-strict-level trust-remote-code trust-request-chat-template trust-request-mm-kwargs ubatch-size uds
use-fp64-gumbel use-replayssm use-tqdm-on-load uvicorn-log-level video-pruning-method video-pruning-rate
watchdog-config watermark watermark-config weight-transfer-config worker-cls worker-extension-cls
"""
"""Every option of `vllm serve` 0.33, without its dashes."""


@pytest.mark.parametrize("spelling", [str, lambda name: name.replace("-", "_")], ids=["dashes", "underscores"])
def test_every_option_of_vllm_is_known(spelling: Any) -> None:
    parser = _make_parser("serve", serve)
    command = parser._subparsers._group_actions[0].choices["serve"]  # type: ignore[union-attr,index,call-overload]
    unknown = []
    for name in OPTIONS.split():
        [found] = as_declared(command, [f"--{spelling(name)}"])
        if found not in command._option_string_actions:
            unknown.append(name)
    assert not unknown
    assert len(OPTIONS.split()) > 300


def test_none_of_them_is_in_the_help() -> None:
    command = _make_parser("serve", serve)._subparsers._group_actions[0].choices["serve"]  # type: ignore[union-attr,index,call-overload]
    text = command.format_help()
    for name in {*FOREIGN_KEYWORDS, *FOREIGN_SERVER_OPTIONS} - {"served_model_name", "otlp_traces_endpoint"}:
        option = f"--{name.replace('_', '-')} "
        assert option not in text or name in ("reasoning_parser", "chat_template"), name


def test_drafts_as_sglang_and_llama_cpp_ask_for_them() -> None:
    found = engine("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "2", "--speculative-eagle-topk", "1")
    assert found.speculative_config == {"method": "NEXTN", "num_speculative_tokens": 2}
    found = engine("--spec-type", "draft-mtp", "--spec-draft-n-max", "3")
    assert found.speculative_config == {"method": "draft-mtp", "num_speculative_tokens": 3}


def test_a_whole_command_line(caplog: pytest.LogCaptureFixture) -> None:
    words = (
        "--max_model_len 64 -tp 2 -dp 1 --gpu_memory_utilization 0.5 --trust-remote-code --disable-log-requests "
        "--max_num_queued_reqs 7 --spec-method ngram --spec_tokens 3 --swap-space 4 --enable-chunked-prefill "
        "--numa-bind --collect-detailed-traces model worker --no-enable-prefix-caching --uvicorn-log-level info"
    )
    with caplog.at_level(logging.WARNING, "mvllm"):
        found = engine(*words.split())
    assert (found.max_model_len, found.tensor_parallel_size, found.memory_utilization) == (64, 2, 0.5)
    assert (found.max_queued_requests, found.enable_prefix_caching) == (7, False)
    assert found.speculative_config == {"method": "ngram", "num_speculative_tokens": 3}
    assert [message.partition("=")[0] for message in caplog.messages] == [
        *("swap_space", "numa_bind", "collect_detailed_traces"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-O3", "optimization_level=3 has no effect."),
        ("-O 0", "optimization_level=0 has no effect."),
        ("-cc.mode 3", "compilation_config={'mode': 3} has no effect."),
        ("--cudagraph-capture-sizes 1 2 4", "cudagraph_capture_sizes=[1, 2, 4] has no effect."),
        ("--max-cudagraph-capture-size 8", "max_cudagraph_capture_size=8 has no effect."),
        ("--num_gpu_blocks_override 16", "num_gpu_blocks_override=16 has no effect. kv_cache_memory_bytes sets"),
        ("--enable-flashinfer-autotune", "enable_flashinfer_autotune=True has no effect."),
        ("--no-enable-flashinfer-autotune", None),
        ("-ep", "enable_expert_parallel=True has no effect."),
    ],
)
def test_an_option_without_effect_warns_with_the_name_that_was_typed(
    words: str, message: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "mvllm"):
        engine(*words.split())
    assert [each[: len(message or "")] for each in caplog.messages] == ([message] if message else [])


def test_a_short_option_is_short_for_an_option_that_exists() -> None:
    known = {f"--{name}" for name in OPTIONS.split()} | {"--optimization-level"}
    assert set(SHORT_OPTIONS.values()) <= known


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("--ssl-keyfile k.pem", "--ssl-keyfile"),
        ("--middleware my.Auth", "--middleware"),
        ("--headless", "--headless"),
        ("--tokens-only", "--tokens-only"),
        ("--skip-tokenizer-init", "--skip-tokenizer-init"),
    ],
)
def test_what_would_open_or_change_the_server_is_refused(words: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not supported"):
        server(*words.split())


def test_options_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mvllm"):
        found = server(
            *(
                "--disable-fastapi-docs",
                "--disable-uvicorn-access-log",
                "--allowed-origins",
                '["https://a", "https://b"]',
            ),
            *("--enable-auto-tool-choice", "--enable-request-id-headers", "--enable-force-include-usage"),
            *("--allowed-methods", '["*"]', "--default-chat-template-kwargs.enable_thinking", "false"),
            *("--response-role", "assistant", "--no-enable-log-outputs"),
        )
        assert caplog.messages == []
        server("--root-path", "/llm")
    assert (found.docs, found.access_log, found.allowed_origins) == (False, False, ("https://a", "https://b"))
    assert found.force_include_usage and found.default_chat_template_kwargs == {"enable_thinking": False}
    assert caplog.messages == ["--root-path='/llm' has no effect. " + FOREIGN_SERVER_OPTIONS["root_path"].instead]
    with pytest.raises(ConfigError, match="may not set messages"):
        server("--default-chat-template-kwargs", '{"messages": 1}')


def test_a_config_file_may_have_options_of_another_engine(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("max-model-len: 64\ncudagraph_capture_sizes: [1, 2]\n")
    assert parse("go", "--config", str(path))["max_model_len"] == 64
