"""Every script in docs/examples runs on the demo model and prints the expected text.

Scripts that need no separate process run in this one, which has imported torch already.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.server import SMALL, ServerProcess

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

IN_PROCESS = {
    "offline_batch": r"(?s)Prompt:    'Once upon a time'.*Prompt:    '7 plus 5 is'\nGenerated: ' 12\.'",
    "chat": r"(?s)Assistant: The capital of Japan is Tokyo\.\n.*Oslo\.\n +\([1-9]\d* of \d+ prompt tokens cached",
    "structured_output": r"JSON schema: '.*', \d+, '(cat|dog|turtle)'\nRegex: +2026-\d\d-\d\d\nChoice: +(yes|no)",
    "lora": r"Base model:   (?P<base>'.+')\nWith adapter: (?!(?P=base))'.+'\n",
    "embeddings": r"4 vectors of 192 dimensions\n +0\.\d+  The capital of Italy is Rome\.\n",
    "speculative_decoding": r"Draft tokens: \d+, accepted: [1-9]\d*\n.*\nSame output without speculation: True\n",
    "quantized": r"as stored: ' Paris.*\n     int8: ' Paris.*\n     int4: ' Paris",
}
ARGUMENTS = {"grpo": ["--steps", "3", "--group", "4", "--max-tokens", "16"]}
"""The short form of examples that take minutes."""

OWN_PROCESS = {
    # The difference shows that the engine has the trainer's weights of each step.
    "grpo": r"(?s)step  1 .* difference \d\.\de-0[4-9]  weights 1 .*step  3 .* difference \d\.\de-0[4-9]  weights 3 ",
    "streaming_async": r"(?s)\[request 0\] .*\[request 1\] .*Complete: Once upon a time, .*Complete: What is",
    "tensor_parallel": r"2 workers\nGenerated: ' Paris",
    "own_platform": r"Platform: toy, .*\nGenerated: ' Paris",
}
EXHAUSTIVE = {"tensor_parallel", "streaming_async", "grpo"}
"""The exhaustive tests run these; other tests start such engines, too, and update their weights."""
ELSEWHERE = {"grpo_trl", "trl_client"}  # tests/clients/test_trl.py: they need an environment of their own
OF_SERVER = {
    "openai_client": r"Models: \['demo'\]\nAnswer: The capital of France is Paris\.\n(?s:.*)Embedding: 192 dim",
    "tool_calling": r"Call:   get_weather\({'city': '(Rome|Oslo|Tokyo)', 'unit': '\w+'}\)\nResult: .*\nAnswer: ",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), "demo", "--port", "0", *SMALL) as server:
        yield server.wait_ready()


def test_every_script_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*IN_PROCESS, *OWN_PROCESS, *OF_SERVER, *ELSEWHERE}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in EXHAUSTIVE else ())
        for name in (*IN_PROCESS, *OWN_PROCESS, *OF_SERVER)
    ],
)
def test_an_example_runs(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    script = EXAMPLES / f"{name}.py"
    if name in IN_PROCESS:
        monkeypatch.setattr(sys, "argv", [str(script)])
        runpy.run_path(str(script), run_name="__main__")
        printed = capsys.readouterr().out
    else:
        arguments = [sys.executable, str(script), *ARGUMENTS.get(name, [])]
        if name in OF_SERVER:
            arguments += ["--url", f"{request.getfixturevalue('server').url}/v1"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert ran.returncode == 0, ran.stderr
        printed = ran.stdout
    assert re.search({**IN_PROCESS, **OWN_PROCESS, **OF_SERVER}[name], printed), printed
