"""An engine in a process of its own, for tests that kill things. Says on stdout how far it is, one JSON line each."""

from __future__ import annotations

import json
import sys

from mvllm import LLM, SamplingParams


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    settings = json.loads(sys.argv[1])
    prompts = [{"prompt_token_ids": [5 + i, 6, 7, 8]} for i in range(4)]
    try:
        say(phase="starting")
        with LLM(**settings) as llm:
            say(phase="idle")
            sys.stdin.readline()
            say(phase="running")
            params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            finished = [output.outputs[0] for output in outputs]
            say(phase="done", tokens=[list(o.token_ids) for o in finished], reasons=[o.finish_reason for o in finished])
    except Exception as e:  # noqa: BLE001
        say(phase="failed", kind=type(e).__name__, message=str(e), cause=type(e.__cause__).__name__)
        sys.exit(1)


if __name__ == "__main__":
    main()
