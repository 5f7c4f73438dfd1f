"""A process with an engine that generates until a test kills it: `python -m mvllm.testing._engine_process SETTINGS`."""

from __future__ import annotations

import json
import sys

from mvllm.testing.platform_under_test import PlatformUnderTest
from mvllm.testing.subprocess_checks import print_answer
from mvllm.testing.zoo import generate, make_llm

if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    with make_llm(PlatformUnderTest(settings.pop("name")), settings.pop("folder"), **settings) as llm:
        generate(llm, [[5, 6, 7]])
        print_answer({"ready": True})
        while True:
            generate(llm, [[5, 6, 7]], max_tokens=200)
