"""Imports the Triton kernels with Triton's interpreter; skips the tests of the importing module without Triton.

It imports torch-gpu's module of the same name, whose folder name has a hyphen.
"""

from __future__ import annotations

import importlib

importlib.import_module("platforms.torch-gpu.tests.interpreted")
