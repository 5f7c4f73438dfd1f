"""What users read after mistakes in `speculative_config`, where the methods of this package are listed, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.message_rows import Mistake, check_mistake

GENERATE = "generate demo --prompt x"
THERE_ARE = (
    "There are 'ngram', which proposes what followed the same tokens earlier in the text, 'draft_model', which runs a "
    'smaller model with the same tokenizer ({"model": NAME, "num_speculative_tokens": 4}), \'mtp\', which runs the '
    "multi-token-prediction module of the model's own checkpoint, 'eagle', which drafts with a head that reads the "
    "model's last hidden states, 'eagle3', which drafts with a head that reads hidden states of three layers of the "
    "model, 'suffix', which proposes what followed the same tokens in the request or in recent outputs, by frequency."
)
MISTAKES = [
    Mistake(
        f'{GENERATE} --speculative-config {{"method":"eagle"}}',
        "--speculative-config: the method 'eagle' needs the head's checkpoint. Set model to its folder or name.",
    ),
    Mistake(
        f'{GENERATE} --speculative-config {{"method":"medusa","num_speculative_tokens":2}}',
        "--speculative-config: the method 'medusa' is not supported: it drafts with heads that are trained for the "
        f"model, which are not loaded. {THERE_ARE}",
    ),
    Mistake(
        f'{GENERATE} --speculative-config {{"method":"ngrm"}}',
        f"--speculative-config: the method 'ngrm' does not exist. Did you mean 'ngram'? {THERE_ARE}",
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_says_cause_and_remedy_before_a_worker_starts(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_mistake(mistake, tmp_path, monkeypatch, capsys)
