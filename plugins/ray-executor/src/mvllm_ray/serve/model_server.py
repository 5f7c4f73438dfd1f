"""A replica: runs `mvllm serve` for one model, and forwards requests to it over a Unix domain socket.

The server is the one that users start by hand: every route, option and limit of `mvllm serve` is there.

    Serve's replica actor                      child process
    ModelServer.forward ── Unix socket ──────> mvllm serve ── engine core ── workers: processes, or Ray actors
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import ray
import yaml
from ray import serve

from mvllm.extension_api import get_logger
from mvllm_ray.cluster import PLACEMENT_GROUP_VARIABLE
from mvllm_ray.serve.autoscaling import QueueTime
from mvllm_ray.serve.routing import ForwardedRequest
from mvllm_ray.serve.server_process import command
from mvllm_ray.serve.settings import RAY_BACKEND, Model

logger = get_logger("mvllm.ray.serve")

_POLL_SECONDS = 0.1
_PROBE_SECONDS = 5.0
_END_SECONDS = 10.0
_NOT_RETURNED = frozenset({"connection", "date", "keep-alive", "server", "transfer-encoding", "x-request-id"})
"""Response headers that are of the connection, or that Serve adds."""
KEY_VARIABLE = "MVLLM_API_KEY"
REPLICA_HEADER = "x-mvllm-replica"
_QUEUE_TIME = re.compile(r"^mvllm:request_queue_time_seconds_(sum|count)(?:{[^}]*})? (\S+)$", re.MULTILINE)
_WAITING = re.compile(r"^mvllm:num_requests_waiting(?:{[^}]*})? (\S+)$", re.MULTILINE)


class ServerLostError(Exception):
    """The server of a replica has ended while it processed a request."""


class ModelServer:
    """The class of a model's deployment.

    Args:
        settings: The model, as a JSON object.
    """

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._model = model = msgspec.convert(settings, Model)
        self._folder = Path(tempfile.mkdtemp(prefix="mvllm-ray-"))
        self._socket = self._folder / "server"
        self._process: asyncio.subprocess.Process | None = None
        self._client: aiohttp.ClientSession | None = None
        self._queue_time = QueueTime(time.monotonic())
        self._key = _first_key(model)
        self._replica: str = serve.get_replica_context().replica_id.unique_id
        arguments = ["serve", model.model or model.name, "--config", str(self._write_options())]
        self._process = await asyncio.create_subprocess_exec(*command(arguments), env=self._environment())
        self._client = aiohttp.ClientSession(
            "http://server",
            connector=aiohttp.UnixConnector(str(self._socket), limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_PROBE_SECONDS),
            auto_decompress=False,
        )
        try:
            await self._wait_ready()
        except BaseException:
            await self.__del__()
            raise

    async def forward(self, request: ForwardedRequest) -> AsyncIterator[tuple[int, list[tuple[str, str]]] | bytes]:
        """Sends a request to the server.

        Yields:
            Status and headers of the response, then the parts of its body as they arrive. If the caller stops, the
            server aborts the request.

        Raises:
            ServerLostError: The server has ended before the end of the response.
        """
        assert self._client is not None
        try:
            async with self._client.request(
                request.method,
                request.target,
                headers=request.headers,
                data=request.body or None,
                allow_redirects=False,
            ) as response:
                kept = [(k, v) for k, v in response.headers.items() if k.lower() not in _NOT_RETURNED]
                yield response.status, [*kept, (REPLICA_HEADER, self._replica)]
                async for part in response.content.iter_any():
                    yield part
        except aiohttp.ClientError as e:
            raise ServerLostError(f"the server of the model {self._model.name!r} has ended: {e!r}") from e

    async def check_health(self) -> None:
        """Called by Serve every few seconds. Raises if the server has ended or its engine makes no progress."""
        if self._process is None or self._process.returncode is not None:
            raise ServerLostError(f"the server of the model {self._model.name!r} has ended ({self._status()})")
        status, body = await self._get("/health/live")
        if status != 200:
            raise ServerLostError(f"the server of the model {self._model.name!r} is unhealthy: {body[:300]}")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve for autoscaling: `queue_seconds`, see QueueTime; and `num_waiting`, the requests that wait
        now.
        """
        _, text = await self._get("/metrics")
        found = dict.fromkeys(("sum", "count"), 0.0)
        for name, value in _QUEUE_TIME.findall(text):
            found[name] += float(value)
        waiting = sum(float(value) for value in _WAITING.findall(text))
        seconds = self._queue_time.update(found["sum"], found["count"], waiting, time.monotonic())
        return {"queue_seconds": seconds, "num_waiting": waiting}

    async def __del__(self) -> None:
        """Called by Serve when the requests in progress have ended: stops the server."""
        process, self._process = getattr(self, "_process", None), None
        if client := getattr(self, "_client", None):
            with contextlib.suppress(Exception):
                await client.close()
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), _END_SECONDS)
            except TimeoutError:
                process.kill()
                await process.wait()
        shutil.rmtree(getattr(self, "_folder", ""), ignore_errors=True)

    # --- start

    def _write_options(self) -> Path:
        model = self._model
        options: dict[str, Any] = {"access_log": False}
        options |= {key.replace("-", "_"): value for key, value in model.options.items()}
        options |= {
            "uds": str(self._socket),
            "served_model_name": [model.name, *model.aliases],
            "shutdown_timeout": _END_SECONDS / 2,
        }
        if model.distributed is not None:
            options["distributed_executor_backend"] = RAY_BACKEND
        path = self._folder / "options.yaml"
        path.write_text(yaml.safe_dump(options))
        return path

    def _environment(self) -> dict[str, str]:
        environment = {**os.environ, **self._model.environment}
        context = ray.get_runtime_context()
        environment["RAY_ADDRESS"] = context.gcs_address
        environment.pop(PLACEMENT_GROUP_VARIABLE, None)
        if self._model.distributed is not None:
            environment[PLACEMENT_GROUP_VARIABLE] = context.get_placement_group_id()
        return environment

    async def _wait_ready(self) -> None:
        deadline = time.monotonic() + self._model.start_timeout
        while True:
            if self._process is None or self._process.returncode is not None:
                raise RuntimeError(
                    f"`mvllm serve` for the model {self._model.name!r} has ended at its start ({self._status()}). "
                    "The reason is in this replica's log."
                )
            if self._socket.exists():
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    if (await self._get("/health/ready"))[0] == 200:
                        return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"The model {self._model.name!r} was not ready within {self._model.start_timeout:g} s. Raise "
                    "start_timeout if it needs longer to load."
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def _get(self, path: str) -> tuple[int, str]:
        assert self._client is not None
        headers = {} if self._key is None else {"authorization": f"Bearer {self._key}"}
        timeout = aiohttp.ClientTimeout(total=_PROBE_SECONDS)
        async with self._client.get(path, headers=headers, timeout=timeout) as response:
            return response.status, await response.text()

    def _status(self) -> str:
        return "no process" if self._process is None else f"exit status {self._process.returncode}"


def _first_key(model: Model) -> str | None:
    """A key that the server accepts, for its metrics; None if it needs none."""
    files = model.option("api_key_file", [])
    texts = [Path(path).read_text(encoding="utf-8") for path in ([files] if isinstance(files, str) else files)]
    texts.append(model.environment.get(KEY_VARIABLE) or os.environ.get(KEY_VARIABLE, ""))
    words = [line.split()[0] for text in texts for line in text.splitlines() if line.strip() and line[0] != "#"]
    return words[0] if words else None
