"""Imports what stands on Triton with its interpreter; skips the tests of whoever imports this where there is none."""

from __future__ import annotations

import importlib

importlib.import_module("platforms.torch-gpu.tests.interpreted")
