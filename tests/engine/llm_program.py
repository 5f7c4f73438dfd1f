"""Front ends for tests that kill things: each is a real `LLM` in a process of its own.

The program imports everything once and then forks a front end for each line of JSON on stdin (`model`, `tag`, `faults`,
`settings`), so that a test does not pay for the imports; what the front end starts is started as ever. The front end
says on stdout how far it is, one JSON line each, and goes on from idle when it gets a line; the program says how the
front end ended.
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

assert mvllm_fault_injection.platform and torch  # imported so that front ends need not

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
