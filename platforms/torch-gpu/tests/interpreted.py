"""Imports the shared GPU modules with their kernels on Triton's interpreter, which computes with numpy on the host.

Skips the tests of the importing module if Triton is not installed.
"""

from __future__ import annotations

import importlib

kernels = importlib.import_module("platforms.triton-kernels.tests.interpreted")  # must come first: see interpreter.py

importlib.import_module("mvllm_torch_gpu.attention")
importlib.import_module("mvllm_torch_gpu.ops")
