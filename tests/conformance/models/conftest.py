"""Parametrizes the classes of this folder with the checkpoints that they name."""

import pytest

from tests.helpers.model_zoo import marked

PER_TOKEN = {
    *("llama-gelu", "llama-gelu-tanh", "llama-relu", "llama-mha-tied", "llama-odd-vocabulary-tied", "llama-theta"),
    *("llama-many-files", "llama-rotary-buffers", "llama-without-prefix", "llama-old-rope-keys"),
    *("llama-rope-linear", "llama-rope-proportional", "llama-rope-yarn-settings"),
    *("opt-no-bias-gelu", "opt-untied-plain-norms", "opt-without-prefix", "opt-projected"),
    *("gpt2-inner-relu", "gpt2-unscaled", "gpt2-untied", "gpt2-first-names"),
    *("qwen2-odd-vocabulary", "qwen2-unused-window", "qwen3-linear"),
}
"""Checkpoints that differ from another one of their family only in tensor names, files, or a function of one token or
position. tests/unit/models/test_parity.py compares their logits with those of transformers, for prompts in chunks and
mixed batches; the exhaustive tests add whole engines."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "checkpoint" in metafunc.fixturenames:
        # Preemption does not depend on what differs between the models of a family.
        once = metafunc.function.__name__ == "test_preempted_and_recomputed"
        names = [
            pytest.param(
                *each.values,
                marks=[*each.marks, *[pytest.mark.exhaustive] * (each.values[0] in PER_TOKEN or (once and i > 0))],
            )
            for i, each in enumerate(marked(metafunc.cls.names))
        ]
        metafunc.parametrize("checkpoint", names)
