"""Imports the Triton kernels with Triton's interpreter; skips the tests of the importing module without Triton.

An importable name for torch-gpu's module of the same name, whose folder has a hyphen.
"""

from __future__ import annotations

import importlib

importlib.import_module("platforms.torch-gpu.tests.interpreted")
