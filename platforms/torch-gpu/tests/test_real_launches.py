"""Launches of real models compile for absent devices, fit their shared memory, and spill no more than is listed.

They are compiled in another process, because the test process has Triton with its interpreter.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

importlib.import_module("platforms.torch-gpu.tests.interpreted")  # skips without Triton

ROOT = Path(__file__).parents[3]
MODELS = json.loads((Path(__file__).parent / "meta_models.json").read_text("utf-8"))
real_launches = importlib.import_module("platforms.torch-gpu.tests.real_launches")


def test_a_spill_is_allowed_for_the_listed_kernel_targets_and_constants_only():
    def paged_attention():
        pass

    paged_attention.__module__ = "kernels.attention"
    function = types.SimpleNamespace(fn=paged_attention, __name__="paged_attention")
    entries = [{"kernel": "attention.paged_attention", "targets": ["sm_90"], "constants": {"GROUP": 128}, "bytes": 400}]
    entries[0]["moved"] = 8

    def allowed(target, **constants):
        launch = types.SimpleNamespace(function=function, constants=constants, options={"num_warps": 4})
        return real_launches.allowed_spill(launch, target, entries)

    assert allowed("sm_90", GROUP=128, HEADS=4) == (400, 8)
    assert allowed("sm_90", GROUP=16) == allowed("sm_80", GROUP=128) == (0, 0)


NVIDIA = """\
.L_x_1:
        /*0010*/                   LDL.LU.64 R4, [R1+0x8] ;
.L_x_2:
        /*0020*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0030*/                   STL [R1+0x10], R7 ;
        /*0040*/              @P0 LDL.128 R4, [R1+0x8] ;
        /*0050*/              @!P0 BRA `(.L_x_2) ;
        /*0060*/                   STL.64 [R1+0x10], R7 ;
        /*0070*/              @P1 BRA `(.L_x_1) ;
.L_x_3:
        /*0080*/                   STL.128 [R1+0x10], R8 ;
        /*0090*/                   BRA `(.L_x_3);
"""
AMD = """\
\tscratch_store_dwordx4 off, v[0:3], off ; 16-byte Folded Spill
.LBB0_3:                                ; %Loop
\tv_mfma_f32_32x32x16_bf16 a[0:15], v[0:3], v[4:7], a[0:15]
\tscratch_load_dword v1, off, off ; 4-byte Folded Reload
\ts_cbranch_scc1 .LBB0_3
"""


@pytest.mark.parametrize("text, size", [(NVIDIA, 20), (AMD, 4)])
def test_bytes_of_spills_are_counted_in_the_innermost_loop_with_products(text, size):
    compiled = importlib.import_module("platforms.triton-kernels.tests.compiled")
    assert compiled.moved_in_loops(text) == size


def test_listed_spills_have_known_targets_and_a_reason():
    entries = json.loads(real_launches.SPILLS.read_text("utf-8"))
    for entry in entries:
        assert set(entry["targets"]) <= set(real_launches.DEVICES) and entry["bytes"] > 0 and entry["reason"]
        assert entry["moved"] * entry["threads"] <= entry["tile_bytes"], "as much local memory as loads: smaller tiles"


def test_the_page_shows_the_list():
    assert real_launches.page() == real_launches.PAGE.read_text("utf-8")


def compile_models(folder, *arguments):
    """The lines of real_launches.py."""
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "PYTHONPATH": path, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "platforms.torch-gpu.tests.real_launches", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_decode_of_a_dense_model_compiles_and_fits_for_two_vendors(tmp_path):
    lines = compile_models(tmp_path, "sm_80,gfx942", "Llama-3.1-8B", "--decode")
    for target in ("sm_80", "gfx942"):
        found = {line.split()[1] for line in lines if f" {target} " in line}
        assert {
            "attention.paged_attention",
            "attention.paged_attention_reduce",
            "rotary_embedding_and_cache.rotary_embedding_and_cache",
            "norm.fused_add_rms_norm",
        } <= found


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("target", real_launches.DEVICES)
def test_launches_of_all_models_compile_and_fit(tmp_path, target):
    lines = compile_models(tmp_path, target)
    assert {line[:26].strip() for line in lines} >= set(MODELS)
