"""Runner side of engine_process.py's protocol, executed in the Python of the measured engine.

A runner is a program that passes `serve` a function that loads its engine. It reads one JSON object per line from
standard input, and writes one line per answer to a separate file descriptor, because engines print to standard output:

    started as  run_x.py --model FOLDER --precision bf16 --threads 2 --kv-bytes 1073741824 --max-len 4096 --answers 5
    answers     {"version": "1.2", "says": "...", "load_seconds": 0.3} when it is loaded, or {"unavailable": "why"}
    request     {"prompts": [[ids]], "output": 64, "shared": 0}
    answers     {"seconds": 4.2, "lengths": [64, ...], "first": [ids]}

It needs only the standard library and imports no module of mvllm, because it runs in another engine's environment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

Generate = Callable[[list, int, int], list]
"""(prompts, tokens to generate, tokens of the shared prefix) to the generated token ids of each prompt."""


_load_began: float | None = None


def imports_done() -> None:
    """A runner calls this when its engine's packages are imported: `load_seconds` count from here."""
    global _load_began
    _load_began = time.perf_counter()


class Unavailable(Exception):
    """This engine does not support the configuration; the message says why."""


def serve(load: Callable[[argparse.Namespace], tuple[Generate, str, str]]) -> None:
    """Loads the engine with `load`, which returns a Generate, the version and a note, and answers requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kv-bytes", type=int, required=True)
    parser.add_argument("--max-len", type=int, required=True)
    parser.add_argument("--answers", type=int, required=True)
    parser.add_argument("--option", action="append", default=[])
    args = parser.parse_args()
    answers = os.fdopen(args.answers, "w")

    def answer(**fields: object) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    imports_done()
    try:
        generate, version, says = load(args)
    except Unavailable as e:
        answer(unavailable=str(e))
        return
    assert _load_began is not None
    answer(version=version, says=says, load_seconds=time.perf_counter() - _load_began)
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        tokens = generate(asked["prompts"], asked["output"], asked["shared"])
        seconds = time.perf_counter() - start
        answer(seconds=seconds, lengths=[len(each) for each in tokens], first=[int(i) for i in tokens[0][:16]])
