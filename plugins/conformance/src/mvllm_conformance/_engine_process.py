"""An engine that generates until a test kills its process: `python -m mvllm_conformance._engine_process SETTINGS`."""

from __future__ import annotations

import json
import sys

from mvllm_conformance.platform_under_test import PlatformUnderTest
from mvllm_conformance.subprocess_checks import print_answer
from mvllm_conformance.zoo import generate, make_llm

if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    with make_llm(PlatformUnderTest(settings.pop("name")), settings.pop("folder"), **settings) as llm:
        generate(llm, [[5, 6, 7]])
        print_answer({"ready": True})
        while True:
            generate(llm, [[5, 6, 7]], max_tokens=200)
