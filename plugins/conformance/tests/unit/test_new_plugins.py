"""What `mvllm plugin new` writes runs the whole suite."""

from __future__ import annotations

import json
import re

from mvllm.entrypoints.cli import plugin
from mvllm_conformance.clauses import FAMILIES
from tests.unit.entrypoints.test_plugin_new import workflow_of


def test_the_parts_of_the_workflow_have_every_family_once_and_each_week_all_in_one_run(tmp_path):
    plugin.write_plugin("acme", tmp_path)
    parts = workflow_of(tmp_path)["strategy"]["matrix"]["part"]
    weekly, each_change = re.findall(r"'(\[.*?\])'", parts, flags=re.DOTALL)
    assert [part["only"] for part in json.loads(weekly)] == [""]
    families = [name for part in json.loads(each_change) for name in part["only"].split(",")]
    assert sorted(families) == sorted(FAMILIES)
