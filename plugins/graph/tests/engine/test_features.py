"""Tensor parallelism, LoRA, draft models and encoders of models that run as graphs equal transformers."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from plugins.graph.tests.interpreter_engine import start
from plugins.graph.tests.interpreter_platform import graph_platform_path

from mvllm import LLM, LoRARequest, SamplingParams
from mvllm_graph.interpreter import Interpreter
from tests.engine import test_encoders as encoders
from tests.helpers import encoder_zoo, parity
from tests.helpers.changed_weights import copy_without_head
from tests.helpers.host_block_plans import HostBlockDriver
from tests.helpers.lora_adapters import check_against, merged, write_adapter
from tests.helpers.model_zoo import make_checkpoint
from tests.helpers.parity import Oracle
from tests.helpers.plugins import prepend
from tests.helpers.thread_executor import ThreadExecutor

WHICH = (0, 3, 6, 8, 10)
NUM_TOKENS = 16
THREADS = f"{ThreadExecutor.__module__}.{ThreadExecutor.__qualname__}"
FAMILIES = ("llama-odd-vocabulary-tied", "mixtral", "deepseek3", "gptoss", "gemma2", "granitehybrid", "gpt2")


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepend(monkeypatch, graph_platform_path(tmp_path))


def oracle(name: str = "llama-gqa") -> Oracle:
    return parity.oracle(name, WHICH, NUM_TOKENS)


# ------------------------------------------------------------------------------------------------- tensor parallelism


def test_two_ranks_with_a_program_each(stack: ExitStack) -> None:
    found = oracle()
    llm = start(stack, found.folder, tensor_parallel_size=2, distributed_executor_backend=THREADS)
    outputs = parity.generate(llm, found.prompts, max_tokens=NUM_TOKENS, prompt_logprobs=2)
    parity.check(found, outputs)
    parity.check_prompt_logprobs(found, outputs)
    plain = parity.generate(llm, found.prompts, max_tokens=NUM_TOKENS, logprobs=None)
    assert [list(each.outputs[0].token_ids) for each in plain] == found.tokens


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_of_other_families(stack: ExitStack, name: str) -> None:
    found = oracle(name)
    llm = start(stack, found.folder, tensor_parallel_size=2, distributed_executor_backend=THREADS)
    parity.check(found, parity.generate(llm, found.prompts, max_tokens=NUM_TOKENS))


@pytest.mark.exhaustive
def test_two_stages_of_two_ranks(stack: ExitStack) -> None:
    found = oracle()
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    parity.check(found, parity.generate(start(stack, found.folder, **sizes), found.prompts, max_tokens=NUM_TOKENS))


# --------------------------------------------------------------------------------------------------------------- LoRA

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2, detokenize=False)


def check_adapters(llm: LLM, checkpoint: Path, prompts: list[list[int]], folder: Path) -> None:
    """Two adapters and the model itself in one batch, and again, equal transformers with merged weights."""
    paths = {
        "one": write_adapter(folder / "one", checkpoint, seed=1),
        "two": write_adapter(folder / "two", checkpoint, seed=2, rank=3, targets=("q_proj", "down_proj")),
    }
    requests = [None, *(LoRARequest(name, i, str(path)) for i, (name, path) in enumerate(paths.items(), start=1))]
    models = [merged(checkpoint, None if each is None else Path(each.lora_path)) for each in requests]
    for order in ((0, 1, 2), (2, 0, 1)):
        outputs = llm.generate(
            [prompts[i] for i in order], GREEDY, use_tqdm=False, lora_request=[requests[i] for i in order]
        )
        for i, output in zip(order, outputs, strict=True):
            check_against(models[i], [output], str(i))


@pytest.mark.parametrize("max_loras", [2, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_adapters_of_one_batch(stack: ExitStack, tmp_path: Path, max_loras: int) -> None:
    found = oracle()
    llm = start(stack, found.folder, enable_lora=True, max_loras=max_loras, max_num_batched_tokens=24)
    check_adapters(llm, found.folder, found.prompts[1:4], tmp_path)


@pytest.mark.exhaustive
def test_adapters_over_two_ranks(stack: ExitStack, tmp_path: Path) -> None:
    found = oracle()
    sizes = {"tensor_parallel_size": 2, "distributed_executor_backend": THREADS}
    llm = start(stack, found.folder, enable_lora=True, max_loras=2, **sizes)
    check_adapters(llm, found.folder, found.prompts[1:4], tmp_path)


@pytest.mark.exhaustive
def test_adapters_where_the_compiler_lacks_their_operation(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = Interpreter().operations()
    monkeypatch.setattr(Interpreter, "operations", lambda self: set(every) - {"add_lora_by_slot"})
    found = oracle()
    llm = start(stack, found.folder, enable_lora=True, max_loras=2)
    check_adapters(llm, found.folder, found.prompts[1:4], tmp_path)


# ------------------------------------------------------------------------------------------------------- draft models


def acceptance(llm: LLM) -> float:
    """Accepted draft tokens of each draft token."""
    stats = llm.llm_engine.stats
    assert stats is not None and stats.num_draft_tokens > 0
    return stats.num_accepted_tokens / stats.num_draft_tokens


def test_a_draft_model_has_a_program_of_its_own(stack: ExitStack) -> None:
    found = oracle()
    llm = start(stack, found.folder, speculative_config={"model": str(found.folder), "num_speculative_tokens": 3})
    parity.check(found, parity.generate(llm, found.prompts, max_tokens=NUM_TOKENS))
    assert acceptance(llm) > 0.8, "it drafts what the same model generates"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gpt2", "granitehybrid"])
def test_draft_models_of_other_families(stack: ExitStack, name: str) -> None:
    found, folder = oracle(), Path(tempfile.mkdtemp(prefix="mvllm-draft-"))
    draft = make_checkpoint(name, folder / name)
    llm = start(stack, found.folder, speculative_config={"model": str(draft), "num_speculative_tokens": 2})
    parity.check(found, parity.generate(llm, found.prompts, max_tokens=NUM_TOKENS))
    assert acceptance(llm) < 1


@pytest.mark.exhaustive
def test_a_draft_model_over_two_ranks(stack: ExitStack) -> None:
    found = oracle()
    sizes = {"tensor_parallel_size": 2, "distributed_executor_backend": THREADS}
    draft = {"model": str(found.folder), "num_speculative_tokens": 3}
    llm = start(stack, found.folder, speculative_config=draft, **sizes)
    parity.check(found, parity.generate(llm, found.prompts, max_tokens=NUM_TOKENS))
    assert acceptance(llm) > 0.8


# --------------------------------------------------------------------------------------------- encoders, classifiers


@pytest.mark.parametrize(
    "family",
    [
        name if name == "Bert" or not isinstance(name, str) else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in (*encoders.ENCODERS, *encoders.DECODERS)
    ],
)
def test_embeddings_of_encoders_and_decoders(family: str) -> None:
    folder = encoder_zoo.checkpoint(f"{family}Model")
    with encoders.make(folder, platform="graph-interpreter", kv_cache_memory_bytes=2**24) as llm:
        tolerance = encoders.TOLERANCES.get(family, encoders.TOLERANCE)
        encoders.check_vectors(llm, folder, encoder_zoo.prompts(encoders.LENGTHS), tolerance)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["Bert", "DistilBert", "Llama"])
def test_classifiers_compute_their_scores_on_the_host(family: str) -> None:
    folder = encoder_zoo.checkpoint(f"{family}ForSequenceClassification", labels=3)
    with encoders.make(folder, platform="graph-interpreter", kv_cache_memory_bytes=2**24) as llm:
        encoders.check_scores(llm, folder, encoder_zoo.prompts(encoders.LENGTHS))


@pytest.mark.exhaustive
def test_an_encoder_over_two_ranks() -> None:
    folder = encoder_zoo.checkpoint("RobertaModel")
    sizes = {"tensor_parallel_size": 2, "distributed_executor_backend": THREADS}
    with encoders.make(folder, platform="graph-interpreter", **sizes) as llm:
        encoders.check_vectors(llm, folder, encoder_zoo.prompts(encoders.LENGTHS))


def test_a_checkpoint_without_head_makes_embeddings(stack: ExitStack, tmp_path: Path) -> None:
    found = oracle()
    whole, headless = (
        start(stack, folder) for folder in (found.folder, copy_without_head(found.folder, tmp_path / "x"))
    )
    vectors = [
        [each.outputs.embedding for each in llm.embed(found.prompts, use_tqdm=False)] for llm in (whole, headless)
    ]
    assert vectors[0] == vectors[1]


# ------------------------------------------------------------------------------------------------------- host blocks


@pytest.mark.parametrize("name", [pytest.param("llama-gqa", marks=pytest.mark.exhaustive), "bamba"])
def test_caches_and_states_are_copied_to_host_blocks_and_back(stack: ExitStack, tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(name, tmp_path / name)
    llm = start(stack, folder, kv_cache_memory_bytes=2**21, max_num_seqs=4)
    HostBlockDriver(llm).check_round_trip([2 + 7 * i % 300 for i in range(41)])
