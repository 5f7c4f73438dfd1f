"""The files of the published models, and what llama.cpp gave for them; tests are skipped where there is no file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mvllm.installable import part_versions
from tests.helpers.published import FILES, MISSING, find_published

# Big enough for the longest prompts, and small enough for a busy machine.
SIZES: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": 2**27, "dtype": "float32"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where there is no model, or a package that reads or asks it, one test is skipped and says so for all."""
    lacking = [f"mvllm-{name}" for name in ("gguf", "tools") if part_versions()[name] is None]
    reason = f"{' and '.join(lacking)} are not installed" if lacking else MISSING
    if not lacking and any(find_published(name) for name in FILES):
        return
    mine = [item for item in items if item.path.parent == Path(__file__).parent]
    for item in mine[:1]:
        item.add_marker(pytest.mark.skip(reason=reason))
    items[:] = [item for item in items if item not in mine[1:]]
    config.hook.pytest_deselected(items=mine[1:])


@dataclass(frozen=True)
class Published:
    """A published model.

    Attributes:
        name: A key of FILES.
        path: Its GGUF file.
        measured: What llama.cpp gave; see `measure.py`.
    """

    name: str
    path: Path
    measured: dict[str, Any]


def _published(name: str) -> Published:
    path = find_published(name)
    if path is None:
        pytest.skip(MISSING)
    found = json.loads(Path(__file__).with_name("llama_cpp.json").read_text())
    return Published(name, path, found["models"][name])


@pytest.fixture(scope="session", params=FILES)
def published(request: pytest.FixtureRequest) -> Published:
    """Each of the models."""
    return _published(request.param)


@pytest.fixture(scope="session")
def smollm2() -> Published:
    """The one that chats."""
    return _published("smollm2")
