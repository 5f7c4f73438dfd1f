"""Measures settings for `mvllm bench sweep`: an engine or a server in a process of its own, a few rounds per start.

Each start is a new process, so that settings cannot affect each other and environment variables apply. Rounds of one
start have different requests, because the prefix cache would make a repeated round faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from mvllm.extension_api import ConfigError, MvllmError
from mvllm_bench.datasets import BenchmarkTokenizer, SampleRequest, sample_requests
from mvllm_bench.metrics import calculate_metrics, meets_limits
from mvllm_bench.sweep import Round, Settings, Start

WARM_UP_REQUESTS = 16
_WARM_UP_SEED = 1 << 20  # of no round
_LAST_LINES = 4
_POLL_SECONDS = 0.05
_END_SECONDS = 30.0


@dataclass(frozen=True)
class Workload:
    """The requests of a round; the fields are arguments of `sample_requests`, except `ignore_eos`."""

    name: str
    num_prompts: int
    seed: int = 0
    path: str | None = None
    input_len: int | None = None
    output_len: int | None = None
    range_ratio: float = 0.0
    prefix_len: int | None = None
    num_prefixes: int = 10
    ignore_eos: bool = True

    def samples(self, tokenizer: BenchmarkTokenizer, number: int | None) -> list[SampleRequest]:
        """The requests of a round by its number; fewer ones, to warm up, for None."""
        return sample_requests(
            self.name,
            min(self.num_prompts, WARM_UP_REQUESTS) if number is None else self.num_prompts,
            tokenizer=tokenizer,
            seed=self.seed + (_WARM_UP_SEED if number is None else number),
            path=None if self.path is None else Path(self.path),
            input_len=self.input_len,
            output_len=self.output_len,
            range_ratio=self.range_ratio,
            prefix_len=self.prefix_len,
            num_prefixes=self.num_prefixes,
        )


class EngineTrial:
    """Measures output tokens per second of an engine that gets all requests of a round at once.

    Args:
        settings: Settings of every start, keywords of EngineArgs.
        workload: The requests.
        timeout: Seconds that a start with its rounds may take.

    Attributes:
        platform: Summary of the platform on which the last start ran; empty before.
    """

    def __init__(self, settings: Settings, workload: Workload, timeout: float) -> None:
        self._settings = settings
        self._workload = workload
        self._timeout = timeout
        self.platform = ""

    def __call__(self, start: Start) -> list[Round]:
        """The rounds of a start.

        Raises:
            MvllmError: The engine did not start, failed, or took too long; has the last lines of its output.
        """
        options, environment = split_settings({**self._settings, **dict(start.candidate.settings)})
        with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+b") as log:
            result = Path(folder) / "result.json"
            order = {
                "result": str(result),
                "settings": options,
                "workload": asdict(self._workload),
                "rounds": list(range(start.first_round, start.first_round + start.num_rounds)),
            }
            command = [sys.executable, "-m", "mvllm_bench.sweep_trial"]
            with _process(command, log, environment) as process:
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # the process has ended; its log says why
                    process.stdin.write(json.dumps(order).encode())
                    process.stdin.close()
                try:
                    status = process.wait(self._timeout)
                except subprocess.TimeoutExpired:
                    raise MvllmError(f"took longer than {self._timeout:g} s (--trial-timeout)") from None
            if status != 0 or not result.is_file():
                raise MvllmError(_last_lines(log) or f"exit status {status}")
            found = json.loads(result.read_text(encoding="utf-8"))
        self.platform = found["platform"]
        return [
            Round(each["output_tokens_per_second"], {"requests/s": each["requests_per_second"]})
            for each in found["rounds"]
        ]


class ServerTrial:
    """Measures output tokens per second of a server; with limits, only of requests that keep them (goodput).

    Args:
        settings: Settings of every start, options of `mvllm serve`.
        workload: The requests.
        timeout: Seconds that the start of a server may take, and each round.
        limits: Limits in milliseconds by metric, for goodput; None to count every request.
        request_rate: Requests per second; infinite for all at once.
        max_concurrency: Limit of concurrent requests.
        tokenizer: Makes the prompts.
    """

    platform = ""

    def __init__(
        self,
        settings: Settings,
        workload: Workload,
        timeout: float,
        *,
        limits: Mapping[str, float] | None,
        request_rate: float,
        max_concurrency: int,
        tokenizer: BenchmarkTokenizer,
    ) -> None:
        self._settings = settings
        self._workload = workload
        self._timeout = timeout
        self._limits = limits
        self._request_rate = request_rate
        self._max_concurrency = max_concurrency
        self._tokenizer = tokenizer

    def __call__(self, start: Start) -> list[Round]:
        """The rounds of a start.

        Raises:
            MvllmError: The server did not start, failed, or took too long; has the last lines of its output.
        """
        import yaml

        options, environment = split_settings({**self._settings, **dict(start.candidate.settings)})
        with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+b") as log:
            config = Path(folder) / "serve.yaml"
            config.write_text(yaml.safe_dump({**options, "host": "127.0.0.1", "port": 0, "access_log": False}))
            command = [sys.executable, "-m", "mvllm", "serve", "--config", str(config)]
            with _process(command, log, environment) as process:
                url = self._wait_until_ready(process, Path(log.name))
                numbers = [None, *range(start.first_round, start.first_round + start.num_rounds)]
                try:
                    return asyncio.run(self._rounds(url, numbers))[1:]
                except TimeoutError:
                    raise MvllmError(f"a round took longer than {self._timeout:g} s (--trial-timeout)") from None

    def _wait_until_ready(self, process: subprocess.Popen[bytes], log: Path) -> str:
        deadline = time.monotonic() + self._timeout
        while True:
            text = log.read_text(encoding="utf-8", errors="replace")
            if found := re.search(r"Ready at (http\S+?)\.?(\s|$)", text):
                return found[1]
            if process.poll() is not None:
                raise MvllmError(_tail(text) or f"exit status {process.returncode}")
            if time.monotonic() > deadline:
                raise MvllmError(f"the start took longer than {self._timeout:g} s (--trial-timeout)")
            time.sleep(_POLL_SECONDS)

    async def _rounds(self, url: str, numbers: list[int | None]) -> list[Round]:
        from mvllm_bench.client import ENDPOINTS, ServerEndpoint
        from mvllm_bench.server_benchmark import LoadPattern, get_first_model, run_benchmark

        target = ServerEndpoint(
            base_url=url,
            endpoint=ENDPOINTS["openai"],
            model="",
            chat=False,
            ignore_eos=self._workload.ignore_eos,
            extra_body={},
            headers={},
            timeout=self._timeout,
            verify=True,
        )
        target = replace(target, model=await get_first_model(target))
        rounds = []
        for number in numbers:
            samples = self._workload.samples(self._tokenizer, number)
            load = LoadPattern(self._request_rate, 1.0, self._max_concurrency, 0, self._workload.seed)
            async with asyncio.timeout(self._timeout):
                run = await run_benchmark(target, samples, load, tokenizer=self._tokenizer)
            result = calculate_metrics(run.results, run.duration, percentiles=[99], goodput=self._limits)
            if not result["completed"]:
                error = next((each.error for each in run.results if each.error), "")
                raise MvllmError(f"no request succeeded: {error}")
            score = result["output_throughput"]
            if self._limits is not None:
                good = (each for each in run.results if each.success and meets_limits(each, self._limits))
                score = sum(each.num_output_tokens for each in good) / max(run.duration, 1e-9)
            rounds.append(
                Round(score, {"p99 TTFT (ms)": result["p99_ttft_ms"], "p99 TPOT (ms)": result["p99_tpot_ms"]})
            )
        return rounds


def split_settings(settings: Settings) -> tuple[dict[str, Any], dict[str, str]]:
    """Options, and environment variables: names in capitals."""
    options = {name: value for name, value in settings.items() if not name.isupper()}
    return options, {name: str(value) for name, value in settings.items() if name.isupper()}


@contextlib.contextmanager
def _process(command: list[str], log: IO[bytes], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its output in `log`, which ends with the block."""
    ours = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env={**ours, **environment},
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()  # its workers end with it
            process.wait()
        finally:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()


def _last_lines(log: IO[bytes]) -> str:
    log.seek(0)
    return _tail(log.read().decode("utf-8", "replace"))


def _tail(text: str) -> str:
    """The last lines of an output, from its last error message on if there is one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for i in range(len(lines) - 1, max(-1, len(lines) - 50), -1):
        if lines[i].startswith("error: "):
            return " ".join(lines[i : i + _LAST_LINES]).removeprefix("error: ")
    return " ".join(lines[-_LAST_LINES:])


def _measure_engine(order: Mapping[str, Any]) -> None:
    """Main function of the process of an EngineTrial: starts an engine, runs the rounds, writes the result."""
    from mvllm.extension_api.cli import EngineArgs
    from mvllm.extension_api.engine import LLM, SamplingParams
    from mvllm_bench.offline import measure_throughput

    try:
        args = EngineArgs.from_kwargs(**order["settings"])
        workload = Workload(**order["workload"])
        tokenizer = BenchmarkTokenizer(args.tokenizer or args.model)
        params = SamplingParams(ignore_eos=workload.ignore_eos, detokenize=True)
        with LLM.from_engine_args(args) as llm:
            measure_throughput(llm.llm_engine, workload.samples(tokenizer, None), params)
            rounds = [
                measure_throughput(llm.llm_engine, workload.samples(tokenizer, number), params)
                for number in order["rounds"]
            ]
            found = {"rounds": rounds, "platform": llm.llm_engine.platform_summary}
    except MvllmError as e:
        sys.exit(f"error: {e}")
    Path(order["result"]).write_text(json.dumps(found), encoding="utf-8")


def check_workload(workload: Workload, tokenizer: BenchmarkTokenizer) -> None:
    """Makes the requests of one round, so that wrong options are reported before anything starts.

    Raises:
        ConfigError: The workload's options are invalid.
    """
    if not workload.samples(tokenizer, 0):
        raise ConfigError("The dataset has no requests of a usable length.")


if __name__ == "__main__":
    _measure_engine(json.loads(sys.stdin.buffer.read()))
