"""`mvllm collect-env`: contents of the report, and masked secrets."""

from __future__ import annotations

import json
import sys

import mvllm
from mvllm.entrypoints.cli.main import main
from mvllm.installable import describe_parts
from mvllm_tools import collect_env


def test_the_report_has_software_plugins_and_machine(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_mine")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["collect-env", "--json"]) == 0
    text = capsys.readouterr().out
    report = json.loads(text)
    assert "hf_secret_of_mine" not in text
    assert report["mvllm"]["version"] == mvllm.__version__
    assert report["mvllm"]["parts"] == describe_parts()
    assert report["python"]["executable"] == sys.executable
    assert report["torch"]["version"].startswith(report["packages"]["torch"].partition("+")[0])
    assert report["torch"]["threads"] == 1
    assert {"transformers", "msgspec", "mvllm"} <= set(report["packages"])
    assert any(platform["state"] == "available" for platform in report["platforms"].values())
    assert report["processor"]["logical_cores"] >= 1
    assert report["memory"]["total"].endswith("GiB")
    assert report["environment"]["OMP_NUM_THREADS"] == "1"
    assert report["environment"]["HF_TOKEN"] == collect_env.MASK


def test_secrets_are_masked_and_unrelated_variables_excluded():
    found = collect_env.variables(
        {
            "MVLLM_API_KEY": "k1\nk2",
            "MVLLM_ADMIN_API_KEY": "k3",
            "HF_TOKEN": "t",
            "OPENAI_API_KEY": "o",
            "RAY_AUTH_TOKEN": "r",
            "HF_EMPTY_TOKEN": "",
            "TOKENIZERS_PARALLELISM": "false",
            "https_proxy": "http://me:pw@proxy:3128",
            "ACME_VISIBLE_DEVICES": "0",
            "MVLLM_PLATFORM": "acme",
            "MY_DIARY": "private",
            "PASSWORD": "p",
        }
    )
    assert found == {
        "MVLLM_API_KEY": collect_env.MASK,
        "MVLLM_ADMIN_API_KEY": collect_env.MASK,
        "HF_TOKEN": collect_env.MASK,
        "OPENAI_API_KEY": collect_env.MASK,
        "RAY_AUTH_TOKEN": collect_env.MASK,
        "HF_EMPTY_TOKEN": "",
        "TOKENIZERS_PARALLELISM": "false",
        "https_proxy": f"http://{collect_env.MASK}@proxy:3128",
        "ACME_VISIBLE_DEVICES": "0",
        "MVLLM_PLATFORM": "acme",
    }


def test_a_section_that_fails_does_not_end_the_others(monkeypatch):
    def fail():
        raise OSError("no such file")

    monkeypatch.setattr(collect_env, "_torch", lambda: {"version": None})
    monkeypatch.setattr(collect_env, "_memory", fail)
    report = collect_env.collect({})
    assert report["memory"] == {"error": "OSError: no such file"}
    text = collect_env.as_text(report)
    assert "memory\n  error  OSError: no such file" in text
    assert "environment\n  (none)" in text
    assert f"mvllm\n  version   {mvllm.__version__}" in text


def test_a_failed_import_of_torch_is_reported(monkeypatch):
    monkeypatch.setattr(collect_env, "_TORCH_PROBE", "raise ImportError('libfoo.so: cannot open shared object file')")
    assert collect_env._torch()["error"] == "cannot be imported: ImportError: libfoo.so: cannot open shared object file"
