"""EAGLE and EAGLE-3: draft tokens are those of the published description, and the outputs those without drafts."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins.drafts.tests.eagle_heads import (
    CONFIG,
    ReferenceHead,
    agreeing_head,
    change_little,
    eagle3_tensors,
    head_settings,
    write_eagle,
    write_eagle3,
    write_head,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from mvllm import SamplingParams
from mvllm.errors import ConfigError, ModelError
from mvllm.extension_api.draft_heads import DraftStep, HeadProposer, Proposer
from mvllm_drafts.parallel_proposer import ParallelProposer
from tests.engine.conftest import MakeLLM
from tests.engine.test_async_scheduling import requests
from tests.engine.test_speculative import GREEDY, THREADS, acceptance, check_close, draw, run, tokens
from tests.helpers.model_zoo import make_checkpoint
from tests.helpers.parity import bytes_of_blocks
from tests.helpers.plugins import example_platform_path, prepend

K = 3


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Known tokens and draft tokens of each row of each step."""
    found: list[tuple[list[int], list[int]]] = []

    def keep(kind: type[Proposer]) -> None:
        propose = kind.propose

        def record(self: Proposer, step: DraftStep) -> list[list[int]]:
            history = self.context.rows.history
            known = [history.token_ids[row, : history.num_tokens[row]].tolist() for row in step.rows]
            drafts = propose(self, step)
            found.extend(zip(known, drafts, strict=True))
            return drafts

        monkeypatch.setattr(kind, "propose", record)

    keep(HeadProposer)
    keep(ParallelProposer)
    return found


@cache
def transformers_model(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


@torch.inference_mode()
def states_of(folder: Path, token_ids: list[int], layers: list[int]) -> torch.Tensor:
    """The states before layers of the model, side by side, or its last hidden states; at all positions but the last."""
    found = transformers_model(folder)(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
    return torch.cat([found[layer][0] for layer in layers or [-1]], dim=-1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_hidden_layers": 2, "norm_before_residual": True, "own_embedding": True},
        {"norm_before_fc": True, "norm_output": True},
        {"eagle_aux_hidden_state_layer_ids": [1, 2], "fc_norm": True},
        {"num_hidden_layers": 2, "ptd_token_id": 317},
        None,
    ],
    ids=["eagle3", "two layers", "normalised", "two states", "parallel", "eagle"],
)
def test_drafts_are_those_of_the_published_head(
    checkpoint: Path,
    make_llm: MakeLLM,
    tmp_path: Path,
    proposals: list[tuple[list[int], list[int]]],
    settings: dict[str, Any] | None,
) -> None:
    folder = (
        write_eagle(tmp_path / "head", bias=True) if settings is None else write_eagle3(tmp_path / "head", **settings)
    )
    layers = [] if settings is None else settings.get("eagle_aux_hidden_state_layer_ids", [0, 1, 2])
    rng = random.Random(1)
    prompts = [draw(rng, length) for length in (5, 21)]
    params = SamplingParams(max_tokens=12, **GREEDY)
    outputs = tokens(run(make_llm(), prompts, params))
    llm = make_llm(speculative_config=head_settings(folder), max_num_batched_tokens=16)  # chunks of prompts
    assert llm.llm_engine.config.speculative.method == ("eagle" if settings is None else "eagle3")
    assert tokens(run(llm, prompts, params)) == outputs
    reference = ReferenceHead(folder, load_file(checkpoint / "model.safetensors"))
    assert len(proposals) > 12
    for known, drafts in proposals:
        states = states_of(checkpoint, known, layers)
        fused = states if settings is None else reference.fuse(states)
        is_parallel = settings is not None and "ptd_token_id" in settings
        expected = (reference.parallel_drafts if is_parallel else reference.drafts)(known, fused, K)
        assert drafts == expected[: len(drafts)] and drafts


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_every_draft_of_a_head_that_agrees_is_accepted(
    checkpoint: Path, make_llm: MakeLLM, tmp_path: Path, kind: str
) -> None:
    model, head = change_little(checkpoint, tmp_path / "model"), agreeing_head(kind, tmp_path / "head")
    prompts = [draw(random.Random(2), length) for length in (3, 17, 40)]
    params = SamplingParams(max_tokens=30, **GREEDY)
    expected = tokens(run(make_llm(model=model), prompts, params))
    llm = make_llm(model=model, speculative_config=head_settings(head))
    for _ in range(2):  # the second time with prefixes in the cache
        assert tokens(run(llm, prompts, params)) == expected
    guessed, right = acceptance(llm)
    assert guessed > 100 and right >= guessed - 2 * 3 * K  # the last drafts of a request may be behind its end
    stats = llm.llm_engine.stats
    assert stats is not None


@pytest.mark.parametrize("parallel", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_every_request_gives_the_outputs_without_speculation(make_llm: MakeLLM, tmp_path: Path, parallel: bool) -> None:
    """With preemption, chunks of prompts, every kind of setting, and a second time with prefixes in the cache."""
    prompts, params = (each[:9] for each in requests(seed=8))
    expected = make_llm().generate(prompts, params, use_tqdm=False)
    settings: dict[str, Any] = {"max_num_batched_tokens": 33}
    settings["speculative_config"] = head_settings(
        write_eagle3(tmp_path / "head", **({"ptd_token_id": 317} if parallel else {}))
    )
    settings["kv_cache_memory_bytes"] = bytes_of_blocks(make_llm(**settings), 12)
    llm = make_llm(**settings)
    for _ in range(2):
        check_close(llm.generate(prompts, params, use_tqdm=False), expected)
    stats = llm.llm_engine.stats
    assert stats is not None and stats.num_preemptions > 0 and acceptance(llm)[0] > 0


@pytest.mark.parametrize("kind", [pytest.param("eagle", marks=pytest.mark.exhaustive), "eagle3"])
def test_two_tensor_parallel_ranks_draft_what_one_does(make_llm: MakeLLM, tmp_path: Path, kind: str) -> None:
    folder = write_eagle3(tmp_path / "head") if kind == "eagle3" else write_eagle(tmp_path / "head")
    prompts, params = [draw(random.Random(4), 30)], SamplingParams(max_tokens=20, **GREEDY)
    found = []
    for size in (1, 2):
        llm = make_llm(
            tensor_parallel_size=size,
            distributed_executor_backend=THREADS if size > 1 else None,
            speculative_config=head_settings(folder),
        )
        found.append((tokens(run(llm, prompts, params)), acceptance(llm)))
    assert found[0] == found[1] and found[0][1][0] > 0


@pytest.mark.parametrize("parallel", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_a_device_that_copies_asynchronously_drafts_what_the_host_does(
    make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: bool
) -> None:
    prepend(monkeypatch, example_platform_path(tmp_path / "plugins"))
    folder = write_eagle3(tmp_path / "head", **({"ptd_token_id": 317} if parallel else {}))
    prompts, params = [draw(random.Random(4), n) for n in (5, 30)], SamplingParams(max_tokens=12, **GREEDY)
    found = []
    for platform in ("cpu", "example"):
        llm = make_llm(platform=platform, speculative_config=head_settings(folder))
        found.append((tokens(run(llm, prompts, params)), acceptance(llm)))
    assert found[0] == found[1] and found[0][1][0] > 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vocab_size": 4000, "draft_vocab_size": None}, "has 320 tokens. Use a head that was trained for this model"),
        ({"target_hidden_size": 128}, r"hidden states of 128 elements \(target_hidden_size\), but those of .* have 64"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 9, 2]}, r"different layers of .*, from 0 to 2, found \[1, 9, 2\]"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, r"found \[1, 1, 2\]"),
    ],
)
def test_a_head_of_another_model_is_refused(
    make_llm: MakeLLM, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    folder = write_head(tmp_path / "head", eagle3_tensors(), **config)
    with pytest.raises(ModelError, match=message):
        make_llm(speculative_config=head_settings(folder))


def test_what_cannot_be_combined_is_refused_before_the_start(make_llm: MakeLLM, tmp_path: Path) -> None:
    settings = head_settings(write_eagle3(tmp_path / "head"))
    with pytest.raises(ConfigError, match=r"reads hidden states between layers, .* pipeline_parallel_size is 2"):
        make_llm(pipeline_parallel_size=2, speculative_config=settings)
    with pytest.raises(ConfigError, match=r"reads hidden states between layers.* it runs through transformers"):
        make_llm(model_impl="transformers", speculative_config=settings)
    with pytest.raises(ConfigError, match=r"parallel_drafting is true, but .* has no mask token"):
        make_llm(speculative_config={**settings, "parallel_drafting": True})
    with pytest.raises(ConfigError, match="the method 'eagle3' needs the head's checkpoint"):
        make_llm(speculative_config={"method": "eagle3"})
    (tmp_path / "head" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        make_llm(speculative_config=settings)


def test_a_speculator_has_the_layers_config_inside(make_llm: MakeLLM, tmp_path: Path) -> None:
    outer = ("architectures", "draft_vocab_size")
    inner = {key: value for key, value in CONFIG.items() if key not in outer}
    folder = write_head(tmp_path / "head", eagle3_tensors())
    values = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": CONFIG["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "norm_before_residual": True,
        "transformer_layer_config": inner,
    }
    (folder / "config.json").write_text(json.dumps(values))
    llm = make_llm(speculative_config=head_settings(folder))
    run(llm, [draw(random.Random(5), 10)], SamplingParams(max_tokens=10, **GREEDY))
    assert acceptance(llm)[0] > 0


@pytest.mark.parametrize(
    "name",
    [
        *("opt-projected", "gpt2", "mamba2", "gemma4"),
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("falcon", "falconh1", "deepseek2", "olmohybrid")),
    ],
)
def test_states_between_layers_are_those_of_transformers(
    make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of models with a forward pass, or with layers, of their own."""
    steps: list[torch.Tensor] = []
    propose = HeadProposer.propose

    def record(self: HeadProposer, step: DraftStep) -> list[list[int]]:
        assert step.layer_states is not None
        steps.append(step.layer_states.clone())
        return propose(self, step)

    monkeypatch.setattr(HeadProposer, "propose", record)
    first = 1 if name == "mamba2" else 0  # transformers lists its states behind layers
    head = write_eagle3(tmp_path / "head", own_embedding=True, eagle_aux_hidden_state_layer_ids=[first, first + 1])
    model = make_checkpoint(name, tmp_path / "model")
    prompt = draw(random.Random(6), 11)
    llm = make_llm(model=model, speculative_config=head_settings(head))
    run(llm, [prompt], SamplingParams(max_tokens=6, **GREEDY))
    expected = states_of(model, [*prompt, 0], [0, 1])
    torch.testing.assert_close(steps[0][: len(prompt)], expected, rtol=1e-4, atol=1e-4)
