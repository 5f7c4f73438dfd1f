"""Front ends for tests that kill processes: each is a real `LLM` in a separate process.

The program imports all modules once and forks a front end for each line of JSON on stdin (`model`, `tag`, `faults`,
`settings`), so that a test does not pay for the imports; the processes that the front end starts are started as usual.
The front end reports its phase on stdout, one JSON line each, and continues from idle when it reads a line; the program
reports how the front end ended.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

import mvllm_fault_injection.platform
from mvllm import LLM, SamplingParams
from tests.helpers.processes import TAG

assert mvllm_fault_injection.platform and torch  # imported so that front ends need not import them

PROMPTS = [{"prompt_token_ids": [5 + i, 6, 7, 8]} for i in range(4)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def say(**facts: object) -> None:
    os.write(1, json.dumps(facts).encode() + b"\n")


def front_end(model: str, tag: str, faults: str, settings: dict[str, Any]) -> None:
    os.environ[TAG] = tag
    os.environ["FAULT_INJECTION"] = faults
    llm = None
    try:
        say(phase="starting", pid=os.getpid())
        llm = LLM(model, **settings)
        say(phase="idle")
        os.read(0, 100)
        say(phase="running")
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        say(phase="done", tokens=[list(output.outputs[0].token_ids) for output in outputs])
    except Exception as e:
        say(phase="failed", kind=type(e).__name__, message=str(e), cause=type(e.__cause__).__name__)
        sys.exit(1)
    finally:
        if llm is not None:
            llm.close()


def main() -> None:
    say(phase="waiting")
    while line := os.read(0, 1 << 16):
        pid = os.fork()
        if pid == 0:
            front_end(**json.loads(line))
            return
        say(phase="ended", status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    main()
