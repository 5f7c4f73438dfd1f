"""What holds for every test: no network, no setting of the developer's shell, no deadline that a busy machine misses.

Torch is not imported here, nor in any conftest above tests/unit/scheduler and tests/unit/kv_cache: they run without it.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Generator

import pytest
from hypothesis import settings

from tests.helpers import model_coverage, program_server
from tests.helpers.random_seeds import seed_generators

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported, so before any test module is
os.environ["TOKENIZERS_PARALLELISM"] = "false"
for name in [name for name in os.environ if name.startswith("MVLLM_")]:
    del os.environ[name]

# In CI the examples are the same every time. On a developer's machine they are new, and find failures that CI has
# not seen.
settings.register_profile("mvllm", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("mvllm")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(model_coverage.CoverageRecorder(), "mvllm-shown")
    # Folders derived from GGUF files do not go to the developer's cache.
    cache = os.environ["MVLLM_CACHE_DIR"] = tempfile.mkdtemp(prefix="mvllm-test-cache-")
    config.add_cleanup(lambda: shutil.rmtree(cache, ignore_errors=True))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports the tests without garbage collections, which take a third of the time and find little to free.

    Later ones skip the modules, which stay until the end.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Programs are forks of one that has imported torch, where the test does not want them fresh.

    It is started before a test that counts its children, and for no unit test.
    """
    seed_generators(item.nodeid)
    level = logging.getLogger("mvllm").level  # which a command that a test calls sets
    with program_server.programs(fresh=item.get_closest_marker("fresh_programs") is not None):
        if not {"unit", "packaging"} & set(item.path.parts):
            program_server.start()
        try:
            return (yield)
        finally:
            logging.getLogger("mvllm").setLevel(level)
