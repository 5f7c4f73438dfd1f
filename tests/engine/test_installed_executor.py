"""A third-party executor in its own distribution: it is found by its name or its import path, and runs the model."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.engine.conftest import MakeLLM
from tests.helpers.plugins import prepend, write_metadata

EXECUTOR = '''
"""Each worker in a thread of its own, and a line for each step."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mvllm.extension_api import Executor, WorkerContext, WorkerWrapper


class ThreadExecutor(Executor):
    def __init__(self, config, platform):
        super().__init__(config, platform)
        self._thread = ThreadPoolExecutor(1)
        ctx = WorkerContext(seed=config.model.seed)
        self._worker = self._thread.submit(WorkerWrapper, config, platform, ctx).result()

    def collective_rpc(self, method, args=(), *, timeout=None, ranks=None, non_block=False):
        if ranks is not None and 0 not in ranks:
            return []
        future = self._thread.submit(lambda: [self._worker.call(method, *args)])
        return future if non_block else future.result(timeout)

    def execute_model(self, plan):
        with Path(os.environ["ACME_STEPS"]).open("a") as log:
            log.write(f"{plan.step}\\n")
        return self._thread.submit(self._worker.execute_model, plan)

    def shutdown(self):
        self._thread.submit(self._worker.shutdown).result()
        self._thread.shutdown()
'''

PROGRAM = """
import sys
from mvllm import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
tokens = []
for backend in (sys.argv[1], "uni"):
    with LLM("demo", distributed_executor_backend=backend) as llm:
        [output] = llm.generate(["Once upon a time"], params, use_tqdm=False)
    tokens.append(output.outputs[0].token_ids)
assert len(tokens[0]) == 12 and tokens[0] == tokens[1], tokens
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder like site-packages: the code and the metadata of acme-executor."""
    site = write_metadata(
        tmp_path / "site", "acme-executor", "[mvllm.executors]\nacme = acme_executor:ThreadExecutor\n"
    )
    (site / "acme_executor.py").write_text(textwrap.dedent(EXECUTOR))
    return site


@pytest.mark.parametrize(
    "backend",
    ["acme", *(pytest.param(f"acme_executor{mark}ThreadExecutor", marks=pytest.mark.exhaustive) for mark in ".:")],
)
def test_an_executor_of_another_distribution_runs_the_model(backend: str, site: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(site), *filter(None, sys.path)])
    steps = tmp_path / "steps"
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, backend],
        env={**os.environ, "PYTHONPATH": path, "ACME_STEPS": str(steps)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert len(steps.read_text().split()) >= 12, "every step has passed through the stranger's hands"


def test_the_error_of_a_broken_executor_names_its_distribution(
    make_llm: MakeLLM, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "acme_executor.py").write_text("import there_is_no_such_package\n")
    prepend(monkeypatch, [str(site)])
    with pytest.raises(
        ValueError, match=r"acme_executor:ThreadExecutor of acme-executor 0\.1\.0, which cannot be loaded"
    ):
        make_llm(distributed_executor_backend="acme")
