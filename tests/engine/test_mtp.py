"""The method `mtp`: drafts of a checkpoint's multi-token-prediction module, compared with the module in plain torch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mvllm import LoRARequest, SamplingParams, StructuredOutputsParams
from mvllm.errors import ConfigError, RequestError
from mvllm.models import weight_loader
from mvllm.models.mtp_head import MTPHead
from mvllm.models.safetensors_file import MOST_TENSORS
from mvllm.structured_output.sequence_grammar import SequenceGrammar
from tests.engine.test_speculative import (
    GREEDY,
    NGRAM,
    THREADS,
    acceptance,
    change_draft_lengths,
    check_close,
    draw,
    random_requests,
    run,
    tokens,
)
from tests.helpers import multimodal_zoo
from tests.helpers.changed_weights import tensors_of
from tests.helpers.float8_zoo import FLOAT8_SCHEMES, quantize_to_float8
from tests.helpers.lora_adapters import write_adapter
from tests.helpers.model_zoo import make_checkpoint
from tests.helpers.paged_driver import load_model
from tests.helpers.parity import MAX_LEN, bytes_of_blocks, engine
from tests.helpers.quantized_zoo import SCHEMES, quantize
from tests.helpers.threads import generate_in_threads
from tests.helpers.zoo_mtp import MTP_ZOO, MTPReference, load_head, nearly_agree, predict_from_the_last_token

EVERY_RUN = ("glm5", "qwen35moe", "ernie45moe", "mimo")
"""Sparse attention with a latent; a hybrid; the model's norm; the hidden state first."""


NO_DRAFTS: dict[str, Any] = {"speculative_config": {"method": "none"}}


def mtp(count: int) -> dict[str, Any]:
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": count, "adaptive": False}}


@functools.cache
def reference(name: str, kind: str = "random", seed: int = 0) -> MTPReference:
    """A checkpoint whose module agrees with the model, nearly agrees with it, or does not."""
    edit = {"random": None, "agrees": predict_from_the_last_token, "near": nearly_agree}[kind]
    return MTPReference(name, Path(tempfile.mkdtemp(prefix="mvllm-mtp-")) / name, seed=seed, edit=edit)


@contextmanager
def recorded_logits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """The logits that the module computes for a single request, each with its position."""
    found: list[tuple[int, torch.Tensor]] = []
    forward, compute_logits = MTPHead.forward, MTPHead.compute_logits
    last = 0

    def run_module(self: MTPHead, input_ids: torch.Tensor, positions: torch.Tensor, *others: Any) -> torch.Tensor:
        nonlocal last
        last = int(positions[-1])
        return forward(self, input_ids, positions, *others)

    def record(self: MTPHead, hidden: torch.Tensor) -> torch.Tensor:
        logits = compute_logits(self, hidden)
        found.append((last, logits[-1].clone()))
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(MTPHead, "forward", run_module)
        patch.setattr(MTPHead, "compute_logits", record)
        yield found


def check_both_drafts(found: list[tuple[int, torch.Tensor]], expected: MTPReference, sequence: list[int]) -> None:
    """Asserts that recorded logits of two draft tokens after each step are those of the module in plain torch."""
    assert len(found) > 8
    for (position, first), (further, second) in zip(found[::2], found[1::2], strict=True):
        assert further == position + 1
        for mine, theirs in zip((first, second), expected.drafts_at(sequence, position + 2), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("mimo", marks=pytest.mark.shows("tokens", family="mimo")),
        *(
            pytest.param(name, marks=[pytest.mark.exhaustive] * (name not in EVERY_RUN))
            for name in MTP_ZOO
            if name != "mimo"
        ),
    ],
)
def test_logits_of_both_draft_tokens_are_those_of_the_module_at_every_position(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a prompt in chunks, then with its prefix in the cache."""
    expected, prompt = reference(name), draw(random.Random(name), 37)
    greedy = SamplingParams(max_tokens=12, **GREEDY)
    with engine(expected.folder, **NO_DRAFTS) as llm:
        plain = tokens(run(llm, [prompt], greedy))
    assert plain[0] == expected.greedy_after([*prompt, *plain[0]], len(prompt))
    with engine(expected.folder, max_num_batched_tokens=16, state_snapshot_interval=16, **mtp(2)) as llm:
        for _ in range(2):
            with recorded_logits(monkeypatch) as found:
                output = run(llm, [prompt], greedy)[0]
            assert [list(output.outputs[0].token_ids)] == plain
            check_both_drafts(found, expected, [*prompt, *plain[0]])
        assert output.num_cached_tokens == 32


@pytest.mark.parametrize("name", ["mimo", pytest.param("qwen35moe", marks=pytest.mark.exhaustive)])
def test_logits_are_those_of_the_module_after_swaps_and_sleep(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is preempted again and again, and its blocks come back from host memory."""
    expected, prompt = reference(name), draw(random.Random(7), 37)
    settings = {"kv_offloading_size": 0.01, "preemption_mode": "swap", "state_snapshot_interval": 16}
    with engine(expected.folder, **mtp(2), **settings) as llm:
        core, scheduler = llm.llm_engine, llm.llm_engine._client._core.scheduler
        swapper = scheduler._planner._running_plan._blocks._swapper
        for level in (0, 1, 2):
            if level:
                llm.sleep(level)
                llm.wake_up()
            core.add_request("a", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=12, **GREEDY))
            num_swapped, outputs = 0, []
            with recorded_logits(monkeypatch) as found:
                for number in itertools.count():
                    outputs += core.step()
                    if not core.has_unfinished_requests():
                        break
                    if number % 3 == 2 and scheduler.requests.running:
                        assert swapper.swap_out(scheduler.requests.running[-1])
                        scheduler.requests.preempt_last(is_swapped=True)
                        num_swapped += 1
            sequence = [*prompt, *outputs[-1].outputs[0].token_ids]
            assert num_swapped > 1 and sequence[37:] == expected.greedy_after(sequence, 37)
            check_both_drafts(found, expected, sequence)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("deepseek3", {"tensor_parallel_size": 2}),
        ("qwen35moe", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        *(
            pytest.param(name, settings, marks=pytest.mark.exhaustive)
            for name in MTP_ZOO
            for settings in (
                {},
                {"tensor_parallel_size": 2},
                {"pipeline_parallel_size": 2},
                {"quantization": "int8"},
                {"quantization": "int4"},
            )
        ),
    ],
)
def test_all_drafts_of_a_module_that_agrees_are_accepted(name: str, settings: dict[str, Any]) -> None:
    """The last prompt ends at the longest length."""
    prompts = [draw(random.Random(i), length) for i, length in enumerate((1, 15, 16, 17, 33, 48, MAX_LEN - 13))]
    executor = {"distributed_executor_backend": THREADS} if any("size" in key for key in settings) else {}
    sampling = [SamplingParams(max_tokens=20, ignore_eos=True, temperature=t, seed=1) for t in (0, 0.7)]
    with engine(reference(name, "agrees").folder, max_num_batched_tokens=40, **mtp(3), **settings, **executor) as llm:
        for each in sampling:
            run(llm, prompts, each)
        drafted, accepted = acceptance(llm)
    assert drafted == accepted > 2 * 6 * 9


@pytest.mark.parametrize("name", ["deepseek3", "qwen35moe"])
def test_drafts_after_prefix_hits_of_every_length(name: str) -> None:
    """Hits end up to 17 tokens before the end of the prompt, for one request alone and for all of them together.

    The head's keys of a cached block are there, but for the last position, which depends on the next token.
    """
    shared, greedy = draw(random.Random(1), 64), SamplingParams(max_tokens=7, **GREEDY)
    prompts = [[*shared[:length], 7 + length % 3, *draw(random.Random(length), length % 5)] for length in range(31, 50)]
    folder, counts = reference(name, "near").folder, []
    with engine(folder, **NO_DRAFTS) as llm:
        expected = tokens(run(llm, prompts, greedy))
    engines = [(False, True, mtp(2)), (True, True, mtp(2))]
    if name == "qwen35moe":  # a hybrid
        engines += [(True, False, mtp(2)), (True, True, {"speculative_config": NGRAM})]
    for is_cached, ahead, drafts in engines:
        settings = {"enable_prefix_caching": is_cached, "async_scheduling": ahead, **drafts}
        with engine(folder, state_snapshot_interval=16, **settings) as llm:
            run(llm, [shared], SamplingParams(max_tokens=1, temperature=0))
            before = acceptance(llm)
            found = [run(llm, [prompt], greedy)[0] for prompt in prompts]
            counts.append([now - then for now, then in zip(acceptance(llm), before, strict=True)])
            assert tokens(found) == expected, settings
            if is_cached:
                assert {output.num_cached_tokens for output in found} >= {16, 32, 48}
                assert tokens(run(llm, prompts, greedy)) == expected, settings
    (_, without), *cached = counts[:3]
    assert all(0.8 * without < accepted < drafted for drafted, accepted in cached)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(i, marks=pytest.mark.exhaustive) for i in range(2, 60))])
def test_random_engines_and_requests_give_the_outputs_without_drafts(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    change_draft_lengths(monkeypatch)
    name = rng.choice(list(MTP_ZOO))
    folder = reference(name, rng.choice(["near", "agrees", "random"])).folder
    prompts, wanted = random_requests(rng)
    settings: dict[str, Any] = {"max_num_seqs": rng.choice([1, 3, 16]), **mtp(rng.choice([1, 2, 3, 5]))}
    settings["max_num_batched_tokens"] = rng.choice([16, 17, 40, 64])
    settings["async_scheduling"] = seed % 3 > 0
    settings["speculative_config"]["adaptive"] = rng.random() < 0.7
    ranks: dict[str, Any] = {"distributed_executor_backend": THREADS}
    if rng.random() < 0.3:
        settings |= ranks | rng.choice([{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}])
    with engine(folder, **NO_DRAFTS) as llm:
        expected = run(llm, prompts, wanted)
    has_states = name.startswith(("qwen3", "nemotronh"))
    if rng.random() < 0.5 and not has_states:
        with engine(folder, **settings) as llm:
            num_blocks = llm.llm_engine.cache_summary.blocks_per_request + rng.choice([0, 2])
            settings["kv_cache_memory_bytes"] = bytes_of_blocks(llm, num_blocks)
    with engine(folder, **settings) as llm:
        for num_threads in (1, 3):
            check_close(generate_in_threads(llm, prompts, wanted, num_threads), expected)
        llm.llm_engine._client._core.scheduler.check_integrity()


def test_log_probabilities_have_the_same_bits_with_drafts_and_prefixes_from_the_host() -> None:
    """`batch_invariant` holds for the model alone. The module's keys of a block go to the host with the model's."""
    prompts = [draw(random.Random(i), 40 + i) for i in range(4)]
    greedy, found = SamplingParams(max_tokens=12, logprobs=1, **GREEDY), []
    for settings in (NO_DRAFTS, {**mtp(3), "kv_offloading_size": 0.01}):
        with engine(reference("mimo", "near").folder, batch_invariant=True, **settings) as llm:
            counts = [0]
            for _ in range(2):
                outputs = run(llm, prompts, greedy)
                found.append([(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs])
                if settings is not NO_DRAFTS:
                    counts.append(acceptance(llm)[1])
                    llm.sleep(1)
                    llm.wake_up()
    assert found[0] == found[1] == found[2] == found[3]
    first, second = counts[1], counts[2] - counts[1]
    assert first > 10 and second > 0.8 * first
    assert [output.num_cached_tokens for output in outputs] == [32] * 4


def test_json_is_whole_after_thoughts_that_end_within_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end is at each place of the drafts of a module, of a draft model, and of n-grams."""
    folder, count = reference("mimo", "agrees").folder, 4
    thoughts, end = [159, 267, 2, 281, 69, 47], 288  # each token follows the one before; `ea!aydN`, and then `es`
    schema = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 4}
    form = StructuredOutputsParams(json=schema, thoughts_end="es", disable_any_whitespace=True)
    asked = SamplingParams(temperature=0, max_tokens=50, structured_outputs=form)
    prompts = [[*[*thoughts, end] * 3, *thoughts[: 1 + i]] for i in range(len(thoughts))]
    places, found = set(), []
    draft_masks = SequenceGrammar.draft_masks

    def record(grammar: SequenceGrammar, drafts: list[int]) -> list[bytes]:
        places.update(place for place, token in enumerate(drafts) if token == end)
        return draft_masks(grammar, drafts)

    monkeypatch.setattr(SequenceGrammar, "draft_masks", record)
    for drafts in ({}, {"method": "mtp"}, {"model": str(folder)}, NGRAM):
        common = {"num_speculative_tokens": count, "adaptive": False}
        settings = {"speculative_config": {**drafts, **common}} if drafts else {}
        with engine(folder, async_scheduling="method" in drafts, **settings) as llm:
            places.clear()
            found.append([output.outputs[0] for output in run(llm, prompts, asked)])
            assert not drafts or (places == set(range(count)) and acceptance(llm)[1] > 10)
    assert [[each.token_ids for each in outputs] for outputs in found] == [[each.token_ids for each in found[0]]] * 4
    for output in found[0]:
        answer = json.loads(output.text.partition("es")[2])
        assert len(answer) in (2, 3, 4) and set(answer) <= {"red", "green"}, output.text


def test_adapters_change_the_model_and_not_the_module(tmp_path: Path) -> None:
    folder = reference("mimo", "near").folder
    adapter = LoRARequest("one", 1, str(write_adapter(tmp_path / "one", make_checkpoint("qwen2", tmp_path / "qwen2"))))
    prompts, greedy = [draw(random.Random(3), 20)] * 3, SamplingParams(max_tokens=16, **GREEDY)
    found = []
    for settings in (NO_DRAFTS, mtp(3)):
        with engine(folder, enable_lora=True, **settings) as llm:
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            whose = [None, adapter, None]
            found.append(tokens(llm.generate(asked, greedy, use_tqdm=False, lora_request=whose)))
    assert found[0] == found[1]
    assert found[0][0] == found[0][2] != found[0][1]


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        pytest.param(name, scheme, marks=[pytest.mark.exhaustive] * ((name, scheme) != ("glm4moe", "fp8-blocks")))
        for name in ("glm4moe", "qwen35moe-text", "ernie45moe")
        for scheme in ("awq", "gptq", "w4a16", "fp8-blocks", "ct-channel")
    ],
)
def test_a_quantized_module_drafts_as_its_floats_do(name: str, scheme: str, tmp_path: Path) -> None:
    """The projection has floats beside quantized layers, which config.json does not say."""
    plain = shutil.copytree(reference(name, "near").folder, tmp_path / "plain")
    floats = "lm_head|linear_proj|eh_proj|mtp.fc"
    checkpoint = (
        quantize(dataclasses.replace(SCHEMES[scheme], floats=floats), tmp_path, plain, scheme)
        if scheme in SCHEMES
        else quantize_to_float8(dataclasses.replace(FLOAT8_SCHEMES[scheme], floats=floats), tmp_path, plain)
    )
    prompts, greedy = [draw(random.Random(i), 20 + i) for i in range(4)], SamplingParams(max_tokens=24, **GREEDY)
    rates = []
    for folder in (checkpoint.plain, checkpoint.quantized):
        with engine(folder, skip_tokenizer_init=True, **mtp(2)) as llm:
            run(llm, prompts, greedy)
            drafted, accepted = acceptance(llm)
            rates.append(accepted / drafted)
    assert rates[0] > 0.1
    assert rates[1] == pytest.approx(rates[0], abs=0.15)


# ----------------------------------------------------------------------------------------------- updates of the weights


@pytest.mark.parametrize(
    ("name", "source", "settings"),
    [
        ("deepseek3", "folder", {"tensor_parallel_size": 2, "distributed_executor_backend": THREADS}),
        ("mimo", "names", {"pipeline_parallel_size": 2, "distributed_executor_backend": THREADS}),
        pytest.param("glm5", "tensors", {"quantization": "int8"}, marks=pytest.mark.exhaustive),
        *(
            pytest.param(name, source, {}, marks=pytest.mark.exhaustive)
            for name in MTP_ZOO
            for source in ("folder", "tensors", "names")
        ),
    ],
)
def test_an_update_of_the_weights_updates_the_module(name: str, source: str, settings: dict[str, Any]) -> None:
    """Before it the module does not agree with the model, afterwards it does; sleep reads the first weights again."""
    old, new = reference(name).folder, reference(name, "agrees", 1).folder
    prompts, greedy = [draw(random.Random(i), 20 + i) for i in range(3)], SamplingParams(max_tokens=12, **GREEDY)
    with engine(new, **NO_DRAFTS) as llm:
        expected = tokens(run(llm, prompts, greedy)) if "quantization" not in settings else None
    with engine(old, **mtp(3), **settings) as llm:
        first = tokens(run(llm, prompts, greedy))
        before = acceptance(llm)
        assert before[1] < 0.5 * before[0]
        if source == "folder":
            llm.update_weights(path=new)
        elif source == "tensors":
            llm.update_weights(tensors=tensors_of(new))
        else:
            names = list(tensors_of(new))
            llm.start_weight_update()
            for some in (names[::2], names[1::2]):
                llm.update_weights(path=new, names=some)
            llm.finish_weight_update()
        found = tokens(run(llm, prompts, greedy))
        drafted, accepted = (now - then for now, then in zip(acceptance(llm), before, strict=True))
        assert found == (expected or found) != first
        assert drafted == accepted > 0
        llm.sleep(2)
        llm.wake_up()
        assert tokens(run(llm, prompts, greedy)) == first


def test_an_update_without_the_module_is_refused_where_it_must_be_whole(tmp_path: Path) -> None:
    folder = shutil.copytree(reference("mimo").folder, tmp_path / "without")
    drop_tensors(folder, "model.mtp_layers.")
    with engine(reference("mimo").folder, **mtp(1)) as llm:
        with pytest.raises(RequestError, match=r"nothing was written. The weights in .* are not those of MiMoMTP"):
            llm.update_weights(path=folder)
        llm.update_weights(tensors=tensors_of(folder))


# ------------------------------------------------------------------------------------------------------------- settings


def keep_tensors(folder: Path, is_kept: Callable[[str], bool]) -> None:
    path = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if is_kept(name)}
    save_file(kept, path, metadata={"format": "pt"})


def drop_tensors(folder: Path, prefix: str) -> None:
    keep_tensors(folder, lambda name: not name.startswith(prefix))


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_the_number_of_drafts_is_by_default_that_of_the_modules(tmp_path: Path) -> None:
    folder = shutil.copytree(reference("glm4moe").folder, tmp_path / "two")
    for count in (1, 2):
        edit_config(folder, num_nextn_predict_layers=count)
        with engine(folder, speculative_config={"method": "mtp"}) as llm:
            speculative = llm.llm_engine.config.speculative
            assert speculative is not None and speculative.num_speculative_tokens == count


def test_a_checkpoint_with_a_module_has_drafts_by_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On platforms that gain. Not with the method `none`, without the module's tensors, or with some of them."""
    caplog.set_level(logging.INFO)
    folder = reference("mimo", "near").folder
    without = shutil.copytree(folder, tmp_path / "without")
    drop_tensors(without, "model.mtp_layers.")
    matrices = shutil.copytree(folder, tmp_path / "matrices")
    keep_tensors(matrices, lambda name: "mtp" not in name or "norm" not in name)
    prompts, greedy = [draw(random.Random(i), 20) for i in range(3)], SamplingParams(max_tokens=16, **GREEDY)
    found = []
    for path, settings, is_on in (
        (folder, NO_DRAFTS, False),
        (folder, {}, True),
        (folder, {"speculative_config": None, "async_scheduling": True}, True),
        (folder, {"tensor_parallel_size": 2, "distributed_executor_backend": THREADS}, True),
        (folder, {"load_format": "dummy"}, False),
        (without, {}, False),
        (matrices, {}, False),
    ):
        caplog.clear()
        with engine(path, **settings) as llm:
            speculative = llm.llm_engine.config.speculative
            assert (speculative is not None) == is_on
            assert ('speculative_config={"method": "none"} leaves the module out' in caplog.text) == is_on
            if "load_format" not in settings:
                found.append(tokens(run(llm, prompts, greedy)))
            if is_on:
                assert speculative is not None and speculative.is_default and speculative.adaptive
                assert (speculative.method, speculative.num_speculative_tokens) == ("mtp", 1)
                assert acceptance(llm)[1] > 0
    assert all(each == found[0] for each in found)


def test_checkpoints_without_a_module_are_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(reference("glm4moe").folder, tmp_path / "glm")
    refused = [(checkpoint, "not supported for LlamaForCausalLM. They are for .*DeepseekV3ForCausalLM, ")]
    with_images = multimodal_zoo.make_checkpoint("glm4v_moe", tmp_path / "images")
    refused.append((with_images, "not supported for Glm4vMoeForConditionalGeneration. "))
    edit_config(folder, num_nextn_predict_layers=0)
    refused.append((folder, r"config.json this checkpoint has none \(num_nextn_predict_layers\)"))
    without = shutil.copytree(reference("glm4moe").folder, tmp_path / "without")
    drop_tensors(without, "model.layers.2.")
    refused.append((without, "has no tensor whose name begins with 'model.layers.2.': this copy"))
    for path, message in refused:
        with pytest.raises(ConfigError, match=message):
            engine(path, **mtp(1)).__enter__()
    with pytest.raises(ConfigError, match="the method 'none' has no other keys"):
        engine(folder, speculative_config={"method": "none", "num_speculative_tokens": 2}).__enter__()


def test_the_limit_of_tensors_is_not_that_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module without experts has few tensors, its checkpoint many: the limit follows from the model's."""
    limits, read = [], weight_loader.read_checkpoint

    def read_checkpoint(folder: Path, most_tensors: int, **others: Any) -> Any:
        limits.append(most_tensors)
        return read(folder, most_tensors, **others)

    monkeypatch.setattr(weight_loader, "read_checkpoint", read_checkpoint)
    load_model(reference("ernie45moe").folder)
    load_head(reference("ernie45moe").folder)
    assert limits[0] < limits[1] == MOST_TENSORS
