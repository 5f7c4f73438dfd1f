"""An engine core with scripted workers and without torch, for tests that kill processes.

Prints its phase on stdout, one JSON line each; in phase idle it waits for a line on stdin.
"""

from __future__ import annotations

import json
import sys

from mvllm import SamplingParams
from mvllm.config.engine_args import EngineArgs
from mvllm.engine.core.engine_core import EngineCore
from mvllm.messages.requests import EngineCoreRequest
from mvllm.platform.choose import choose_platform


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    config = EngineArgs.from_kwargs(
        model="demo", tensor_parallel_size=2, kv_cache_memory_bytes=1 << 24, memory_utilization=0.5, dtype="float32"
    ).create_engine_config()
    core = None
    try:
        say(phase="starting")
        core = EngineCore(config, choose_platform("scripted").platform)
        say(phase="idle")
        sys.stdin.readline()
        say(phase="running")
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        core.add_request(EngineCoreRequest(request_id="0", prompt_token_ids=[5, 6, 7], sampling_params=params))
        while core.has_requests():
            core.step()
    except Exception as e:
        say(phase="failed", kind=type(e).__name__, message=str(e), cause=type(e.__cause__).__name__)
        sys.exit(1)
    finally:
        if core is not None:
            core.shutdown()


if __name__ == "__main__":
    main()
