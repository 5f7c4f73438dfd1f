"""A torch with accelerator libraries is reported with its size, unless a platform uses them."""

from __future__ import annotations

import logging
import sys

import pytest

from mvllm.plugin_api import CheckStatus
from mvllm_cpu import doctor, torch_build


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Creates fake distributions by name, version, requirements and files with sizes; no others are installed."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def make(name, version="1.0", requires=(), files=()):
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = [f"Requires-Dist: {requirement}" for requirement in requires]
        (info / "METADATA").write_text(
            "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines])
        )
        (info / "RECORD").write_text("".join(f"{path},,{size}\n" for path, size in files))

    return make


def with_accelerators(installed):
    installed(
        "torch",
        "2.13.0",
        ["filelock", "nvidia-cublas==13.4; platform_system == 'Linux'", "triton==3.7.1", "opt-einsum; extra == 'opt'"],
        [("torch/lib/libtorch_cpu.so", 400 * 10**6), ("torch/lib/libtorch_cuda.so", 900 * 10**6)],
    )
    installed("filelock", files=[("filelock/__init__.py", 10**9)])
    installed("nvidia-cublas", "13.4", ["nvidia-cuda-nvrtc"], [("nvidia/lib/libcublas.so", 600 * 10**6)])
    installed("nvidia-cuda-nvrtc", "13.2", files=[("nvidia/lib/libnvrtc.so", 100 * 10**6)])


def test_the_size_of_all_unused_libraries_is_reported(installed):
    with_accelerators(installed)
    build = torch_build.find_build()
    assert build.unused_bytes == 1600 * 10**6
    assert build.describe() == (
        "torch 2.13.0 carries 1,600 MB of accelerator libraries (nvidia-cublas, nvidia-cuda-nvrtc) that the CPU "
        "platform does not use."
    )
    check = doctor._torch_build()
    assert check.status is CheckStatus.WARNING and "--torch-backend=cpu" in check.remedy


def test_unused_libraries_are_logged_once_at_first_use(installed, caplog, monkeypatch):
    with_accelerators(installed)
    monkeypatch.setattr(logging.getLogger("mvllm"), "propagate", True)
    torch_build.warn_once.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            torch_build.warn_once()
            torch_build.warn_once()
    finally:
        torch_build.warn_once.cache_clear()
    assert [record.getMessage().partition(" of accelerator")[0] for record in caplog.records] == [
        "torch 2.13.0 carries 1,600 MB"
    ]


def test_libraries_that_an_installed_platform_uses_are_not_reported(installed):
    with_accelerators(installed)
    installed("mvllm-cuda")
    assert not torch_build.find_build().is_for_accelerators
    assert "1,600 MB of accelerator libraries" in doctor._torch_build().found
    assert doctor._torch_build().status is CheckStatus.OK


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.13.0"])
def test_a_cpu_build_is_ok(installed, version):
    installed("torch", version, ["filelock"], [("torch/lib/libtorch_cpu.so", 400 * 10**6)])
    check = doctor._torch_build()
    assert check.status is CheckStatus.OK and check.found == f"torch {version} carries no accelerator libraries."


def test_a_missing_torch_is_not_reported(installed):
    assert doctor._torch_build().status is CheckStatus.OK
