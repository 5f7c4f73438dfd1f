"""Waivers: patterns, validation and errors."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from mvllm.errors import ConfigError
from mvllm_conformance.waivers import read_waivers

TODAY = datetime.date(2027, 1, 31)
GOOD = '[[waiver]]\nclause = "ATT-03"\nreason = "slow sums"\nlink = "https://example.com/1"\n'


def read(tmp_path: Path, text: str):
    path = tmp_path / "waivers.toml"
    path.write_text(text)
    return read_waivers(path, TODAY)


def test_a_waiver_covers_the_tests_of_its_clause_that_fit_its_pattern(tmp_path):
    wide, narrow = read(tmp_path, GOOD + GOOD + 'cases = "*float16*"\nexpires = 2027-01-31\n')
    assert wide.covers(["ATT-02", "ATT-03"], "test_x[float32]") and not wide.covers(["ATT-02"], "test_x[float32]")
    assert narrow.covers(["ATT-03"], "test_x[float16-a]") and not narrow.covers(["ATT-03"], "test_x[float32]")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (GOOD.replace("ATT-03", "ATT-ZZ"), "unknown clause 'ATT-ZZ'"),
        (GOOD.replace("slow sums", " "), "ATT-03 has no reason"),
        ('[[waiver]]\nclause = "ATT-03"\nlink = "https://example.com/1"\n', "ATT-03 has no reason"),
        (GOOD.replace("https://example.com/1", "soon"), "has no link"),
        (GOOD + "expires = 2027-01-30\n", "the waiver of ATT-03 expired on 2027-01-30"),
        (GOOD + 'expires = "soon"\n', "must be a date"),
        (GOOD + "forever = true\n", "unknown key 'forever'"),
        ("waiver = 3\n", "may hold"),
        ("[[waiver", "cannot be read"),
    ],
)
def test_an_invalid_waiver_is_named(tmp_path, text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path, text)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read: No such file or directory\. `mvllm plugin new`"):
        read_waivers(tmp_path / "none.toml", TODAY)
