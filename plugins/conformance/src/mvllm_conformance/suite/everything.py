"""Exports all tests of the suite: `from mvllm.testing.suite.everything import *` in a vendor's test file."""

from __future__ import annotations

import importlib

FILES = (
    "test_plg_plugin",
    "test_prb_probe",
    "test_cfg_configuration",
    "test_dev_device",
    "test_kvl_layout",
    "test_att_attention",
    "test_att_sparse_attention",
    "test_att_non_causal_spans",
    "test_ops_operations",
    "test_sta_states",
    "test_kvt_transfer",
    "test_com_communication",
    "test_smp_sampling",
    "test_shp_shapes",
    "test_grf_graphs",
    "test_gra_graphs",
    "test_run_model",
    "test_several_devices",
    "test_e2e_engine",
    "test_lif_lifecycle",
)

__all__ = ["FILES"]

for _file in FILES:
    _module = importlib.import_module(f"mvllm_conformance.suite.{_file}")
    for _name, _value in vars(_module).items():
        # Tests, and fixtures of the test files.
        if _name.startswith("test_") or type(_value).__name__ == "FixtureFunctionDefinition":
            globals()[_name] = _value
            __all__ += [_name]
