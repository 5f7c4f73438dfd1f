"""Response time of `/health/live` while a prompt of 50 MB is tokenized.

    python tests/perf/liveness.py [--megabytes 50] [--api-servers 1]

Starts a server on a platform that computes nothing, with the demo model's tokenizer. The context is long enough that
the server tokenizes the text, and too short to accept it: the answer is 400, after seconds of tokenizing. Meanwhile
probes run one after the other on a separate connection. Prints the probes' times in milliseconds, first without load.
mvllm-null-device must be installed or on PYTHONPATH with metadata.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx2

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.helpers.plugins import null_platform_path  # noqa: E402
from tests.helpers.server import ServerProcess  # noqa: E402

CONTEXT = 8 << 20
SETTINGS = ("--platform", "null", "--load-format", "dummy", "--kv-cache-memory-bytes", str(1 << 36),
            "--max-num-seqs", "1", "--port", "0", "--no-access-log", "--served-model-name", "long")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--api-servers", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = long_context(folder / "model")
        path = [*null_platform_path(folder), os.environ.get("PYTHONPATH", "")]
        count = ("--api-server-count", str(args.api_servers))
        with ServerProcess(folder, str(model), *SETTINGS, *count, PYTHONPATH=os.pathsep.join(path)) as server:
            with server.wait_ready().client(timeout=600) as client, server.client() as probe:
                show("at rest", probe_until(probe, time.perf_counter() + 2))
                body = json.dumps({"prompt": "word " * (args.megabytes * 200_000), "max_tokens": 1}).encode()
                answers: list[httpx2.Response] = []

                def post() -> None:
                    kind = {"Content-Type": "application/json"}
                    answers.append(client.post("/v1/completions", content=body, headers=kind))

                thread = threading.Thread(target=post)
                begin = time.perf_counter()
                thread.start()
                times = probe_until(probe, begin + 600, lambda: not thread.is_alive())
                seconds = time.perf_counter() - begin
                thread.join()
                error = answers[0].json()["error"]
                show(f"{len(body) / 1e6:.0f} MB in {seconds:.1f} s, {answers[0].status_code} {error['code']}", times)


def long_context(folder: Path) -> Path:
    """The demo model's files with a longer context."""
    import mvllm

    shutil.copytree(Path(mvllm.__file__).parent / "demo" / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": CONTEXT}))
    return folder


def probe_until(client: httpx2.Client, deadline: float, is_over: object = lambda: False) -> list[float]:
    times = []
    while time.perf_counter() < deadline and not is_over():  # type: ignore[operator]
        begin = time.perf_counter()
        assert client.get("/health/live").status_code == 200
        times.append(time.perf_counter() - begin)
        time.sleep(0.005)
    return sorted(times)


def show(what: str, times: list[float]) -> None:
    p50, p99 = (times[min(len(times) - 1, int(len(times) * share))] * 1e3 for share in (0.5, 0.99))
    print(f"{what}: {len(times)} probes, p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {times[-1] * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
