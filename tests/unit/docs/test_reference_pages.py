"""The generated reference pages agree with the code and contain every public name."""

from __future__ import annotations

import pytest

import mvllm
from mvllm.platform.capabilities import Capabilities
from tests.unit.docs import cli_page, features_page, metrics_page, python_api_page
from tests.unit.docs.every_part import documented_commands, needs_every_part
from tests.unit.docs.models_page import read_record


@pytest.mark.parametrize(
    "generator",
    [
        pytest.param(cli_page, marks=needs_every_part),
        metrics_page,
        features_page,
    ],
)
def test_a_generated_page_is_up_to_date(generator) -> None:
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(), f"run: python -m {generator.__name__}"


@needs_every_part
def test_the_pages_of_the_python_api_are_up_to_date() -> None:
    pages = python_api_page.pages()
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, "run: python -m tests.unit.docs.python_api_page"
    assert {*(python_api_page.REFERENCE / "python").glob("*.md")} == pages.keys() - {python_api_page.PAGE}


def test_every_public_name_is_in_the_python_api() -> None:
    listed = [name for names in python_api_page.KINDS.values() for name in names]
    assert sorted([*listed, *python_api_page.ALIASES]) == sorted(set(mvllm.__all__) - {"__version__"})
    for alias, name in python_api_page.ALIASES.items():
        assert getattr(mvllm, alias) is getattr(mvllm, name)


def test_every_command_is_in_the_cli_reference() -> None:
    assert {name.split()[0] for name, _ in cli_page.all_commands()} == set(documented_commands())


def test_refused_and_untested_combinations_are_not_shown_as_tested() -> None:
    every = {feature.name: feature for feature in features_page.FEATURES}
    capabilities = Capabilities(("float32",), ("float32",), prefix_caching=True, kv_transfer=True)
    pair = (every["tensor parallel"], every["async scheduling"])
    refusal, _ = features_page.outcome(pair, capabilities, "x")
    assert refusal is not None and refusal.startswith("tensor_parallel_size is 2, which needs")
    assert features_page.outcome((every["KV tiers"],), capabilities, "x")[0] is None
    _, changes = features_page.outcome((every["chunked prefill"],), capabilities, "x")
    assert "scheduler.enable_chunked_prefill" in changes
    for test in features_page.MORE_TESTS.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (features_page.ROOT / file).read_text("utf-8")
    rows, notes = features_page.combinations()
    assert [feature.name for feature in features_page.FEATURES] == [row[0] for row in rows]
    assert {cell for row in rows for cell in row[1:]} >= {"yes", "untested"} and len(notes) >= 2


def test_the_number_of_families_is_that_of_the_record() -> None:
    tested = [
        family
        for (family, implementation, what, _), tests in read_record().items()
        if (implementation, what) == ("native", "tokens") and any("/conformance/" in test for test in tests)
    ]
    assert f"of {len(tested)} families" in features_page.PAGE.read_text("utf-8")


def test_settings_of_different_cases_are_no_combination() -> None:
    decorated = "@parametrize('settings', [{'enable_lora': True}, {'quantization': 'int8', 'async_scheduling': True}])"
    found = features_page.features_of_cases(
        f"{decorated}\ndef test_it(settings):\n    time.sleep(tensor_parallel_size)"
    )
    assert found == {
        frozenset({"tensor parallel", "LoRA"}),
        frozenset({"tensor parallel", "quantized weights", "async scheduling"}),
    }
