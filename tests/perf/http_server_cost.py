"""CPU time of the HTTP server's own code, per request and per event, without processes and sockets.

    python tests/perf/http_server_cost.py [--rounds 8] [--model demo]

256 connections, whose transport only counts writes, and an engine core that returns given tokens at once: what is left
is parsing, validation, tokenizing, detokenizing, encoding and the event loop. System calls are not part of it. Prints
the minimum over the rounds, because other programs only make them slower. Works with the interpreter of another
installation of mvllm, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from typing import Any

import uvicorn
import uvloop
from prometheus_client import CollectorRegistry

from mvllm.config.engine_args import EngineArgs
from mvllm.engine.async_llm import AsyncLLM
from mvllm.entrypoints.openai.common.chat_template_renderer import ChatTemplateRenderer
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.common.serving_models import OpenAIServingModels
from mvllm.entrypoints.openai.server.app import build_app
from mvllm.entrypoints.openai.server.connections import ConnectionTable
from mvllm.entrypoints.openai.server.http_metrics import HTTPMetrics
from mvllm.entrypoints.openai.server.http_protocol import LimitedHttpProtocol, uvicorn_settings
from mvllm.entrypoints.openai.server.server_state import ServerState
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.executor.process import process_utils
from mvllm.messages.requests import EngineCoreOutput, EngineCoreOutputs, FinishReason, SchedulerStats

CONNECTIONS, PROMPT_WORDS, OUTPUT = 256, 20, 64
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Core:
    """An engine core that collects requests."""

    platform_summary, cache_summary, stats, start_seconds = "none", None, SchedulerStats(), {}
    num_other_sequences, heartbeat_age, failure, core_pids = 0, 0.0, None, ()

    def __init__(self, config: Any) -> None:
        self.config, self.requests = config, []

    def attach(self, loop: Any, on_outputs: Any, on_death: Any, on_sleep: Any) -> None:
        self.on_outputs = on_outputs

    def add_requests(self, requests: Any) -> None:
        self.requests += requests

    def abort_requests(self, request_ids: Any) -> None:
        pass


class Transport(asyncio.Transport):
    """A transport that counts writes."""

    num_writes, last = 0, b""

    def write(self, data: Any) -> None:
        self.num_writes += 1
        self.last = data

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


async def run(rounds: int, model: str) -> None:
    core = Core(EngineArgs.from_kwargs(model=model).create_engine_config())
    engine = AsyncLLM(core.config, log_stats=False, client=core)  # type: ignore[arg-type]
    state, renderer = ServerState(60.0), ChatTemplateRenderer()
    renderer.start()
    parsers = {"tool_call_parser": "none", "reasoning_parser": "none", "chat_template": None}
    state.set_ready(ServingContext.create(engine, renderer, **parsers))
    settings = ServerSettings(access_log=False)
    app = build_app(state, OpenAIServingModels(["m"], "m"), HTTPMetrics(CollectorRegistry()), settings)
    config, table = uvicorn.Config(app, **uvicorn_settings()), ConnectionTable(2 * CONNECTIONS)
    connections = []
    for _ in range(CONNECTIONS):
        transport = Transport({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        connections.append((LimitedHttpProtocol(config, table, {}), transport))
        connections[-1][0].connection_made(transport)
    getattr(process_utils, "freeze_garbage_collection", lambda: None)()  # as the server does, if it does
    rng = random.Random(0)
    token_ids = [rng.randrange(300, engine.tokenizer.length) for _ in range(OUTPUT)]
    cases = [("whole", False, OUTPUT, COMPLETIONS), ("stream", True, 1, COMPLETIONS)]
    cases += [("stream", True, 4, COMPLETIONS), ("chat stream", True, 1, CHAT)]
    print("| response | tokens an event | µs from request to engine | µs of the rest | µs an event |")
    print("|" + "---|" * 5)
    for name, stream, step, path in cases:
        times = []
        for _ in range(rounds):
            for _, transport in connections:
                transport.num_writes = 0
            requests = [request(rng, path, stream) for _ in connections]
            begin = time.process_time()
            for (protocol, _), data in zip(connections, requests):
                protocol.data_received(data)
            while len(core.requests) < CONNECTIONS:
                await asyncio.sleep(0)
            received = time.process_time()
            ids, core.requests = [each.request_id for each in core.requests], []
            for i in range(0, OUTPUT, step):
                reason = FinishReason.LENGTH if i + step >= OUTPUT else None
                outputs = [EngineCoreOutput(each, token_ids[i : i + step], reason) for each in ids]
                core.on_outputs(EngineCoreOutputs(outputs))
                while any(each.num_writes < 1 + (i // step + 1) * stream for _, each in connections):
                    await asyncio.sleep(0)
            while stream and not all(each.last.endswith(b"0\r\n\r\n") for _, each in connections):
                await asyncio.sleep(0)
            await asyncio.sleep(0.01)
            ended = time.process_time()
            times.append(((received - begin) / CONNECTIONS * 1e6, (ended - received) / CONNECTIONS * 1e6))
        first, rest = (min(each) for each in zip(*times))
        print(f"| {name} | {step} | {first:.0f} | {rest:.0f} | {rest / (OUTPUT // step):.1f} |")
    renderer.close()


def request(rng: random.Random, path: str, stream: bool) -> bytes:
    """An HTTP request."""
    text = "".join(rng.choice(["the ", "cat ", "sat ", "on a mat ", "and ", "said "]) for _ in range(PROMPT_WORDS))
    prompt = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    data = json.dumps({**prompt, "max_tokens": OUTPUT, "ignore_eos": True, "stream": stream}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(args.rounds, args.model))
