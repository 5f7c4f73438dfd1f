"""The KV connector `nixl` with the real library, which needs no GPU."""

from __future__ import annotations

import os
import site
from pathlib import Path

import mvllm
from tests.clients.conftest import PROGRAMS, RunClient
from tests.clients.environments import ROOT
from tests.helpers.processes import shared_memory_names


def test_blocks_are_read_out_of_the_memory_of_another_process(run_client: RunClient) -> None:
    before = shared_memory_names()
    sources = [str(Path(mvllm.__file__).parents[1]), str(ROOT / "plugins" / "kv-transfer" / "src")]
    ran = run_client(
        *("nixl", PROGRAMS / "nixl_blocks.py"),
        PYTHONPATH=os.pathsep.join([*sources, str(ROOT), *site.getsitepackages()]),
        MVLLM_KV_TRANSFER_KEY="a key of engines in tests, shared",
    )
    assert "Blocks arrived." in ran.stdout, ran.stdout + ran.stderr
    assert shared_memory_names() == before
