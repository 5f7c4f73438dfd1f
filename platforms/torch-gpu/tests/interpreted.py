"""Imports what stands on Triton with its interpreter: numpy on the host in place of a device.

Skips the tests of whoever imports this where there is no Triton.
"""

from __future__ import annotations

import importlib

kernels = importlib.import_module("platforms.triton-kernels.tests.interpreted")  # decides how kernels are made

importlib.import_module("mvllm_torch_gpu.attention")
importlib.import_module("mvllm_torch_gpu.ops")
