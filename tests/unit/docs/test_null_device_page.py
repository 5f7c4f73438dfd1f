"""The listings of the page about the null device are the plugin's sources, and run."""

from __future__ import annotations

import tomllib

from mvllm import LLM, SamplingParams
from tests.helpers.plugins import prepend, write_metadata
from tests.unit.docs.null_device_page import PAGE, listings, page


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.unit.docs.null_device_page"


def test_the_listings_run(tmp_path, monkeypatch) -> None:
    files = listings(PAGE.read_text(encoding="utf-8"))
    project = tomllib.loads(files["pyproject.toml"])["project"]
    # Under another name, so that the page's code runs.
    source = (
        files["src/mvllm_null_device/plugin.py"]
        .replace("mvllm_null_device", "listed_null")
        .replace('name="null"', 'name="listed"')
    )
    [(name, module)] = project["entry-points"]["mvllm.platforms"].items()
    assert (name, module) == ("null", "mvllm_null_device.plugin")
    write_metadata(tmp_path, "listed-null", "[mvllm.platforms]\nlisted = listed_null.plugin\n")
    (tmp_path / "listed_null").mkdir()
    (tmp_path / "listed_null" / "__init__.py").touch()
    (tmp_path / "listed_null" / "plugin.py").write_text(source)
    prepend(monkeypatch, [str(tmp_path)])
    with LLM("demo", platform="listed", skip_tokenizer_init=True) as llm:
        params = SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False)
        [output] = llm.generate([{"prompt_token_ids": [5, 6]}], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == [7, 7, 7]
