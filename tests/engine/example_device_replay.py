"""Runs engines on the example device in mode `replay`: `<kind of steps> ...`; see test_example_device_replay.py.

It is a separate program, because a process can register only one foreign torch device and cannot unregister it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["MVLLM_EXAMPLE_MODE"] = "replay"

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mvllm import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from mvllm.plugin_api import StepKind
from mvllm.worker.model_runner import ModelRunner
from mvllm.worker.step_inputs import StepInputBuilder
from tests.engine.test_mtp import mtp, reference
from tests.engine.test_speculative import acceptance
from tests.helpers.lora_adapters import write_adapter
from tests.helpers.model_zoo import make_checkpoint

NUM_DRAFTS = 3
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_min": 1}}
CHUNKS = {"max_num_batched_tokens": 16}
FEW, MANY = [[5, 6, 7] * 5, [9, 8] * 6], [[5, 6, 7], [9, 8] * 20, [3] * 30]
KINDS: dict[str, tuple[str, StepKind, list[list[int]], dict[str, Any]]] = {
    "decode": ("llama-gqa", StepKind.DECODE, FEW, {}),
    "mixed": ("llama-gqa", StepKind.MIXED, MANY, CHUNKS),
    "verify": ("llama-gqa", StepKind.VERIFY, FEW, DRAFTS),
    "lora": ("llama-gqa", StepKind.MIXED, MANY, CHUNKS),
    "lora-verify": ("llama-gqa", StepKind.VERIFY, FEW, DRAFTS),
    "structured": ("llama-gqa", StepKind.DECODE, MANY, CHUNKS),
    "structured-verify": ("llama-gqa", StepKind.VERIFY, FEW, DRAFTS),
    "window": ("gemma2", StepKind.MIXED, MANY, CHUNKS),
    "hybrid": ("qwen35", StepKind.MIXED, MANY, CHUNKS),
    "hybrid-verify": ("bamba", StepKind.VERIFY, FEW, DRAFTS),
    "hybrid-lora-verify": ("bamba", StepKind.VERIFY, FEW, DRAFTS),
    "mtp": ("mimo", StepKind.VERIFY, FEW, mtp(NUM_DRAFTS)),
    "hybrid-mtp": ("qwen35", StepKind.VERIFY, FEW, mtp(NUM_DRAFTS)),
}
"""Checkpoint, kind of some steps, prompts and settings."""
SETTINGS = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 2 << 20,
    "enable_prefix_caching": False,
}


class Launches(TorchDispatchMode):
    """Counts the operations of the worker's steps by name, except copies, views and allocations.

    Attributes:
        outside: Operations outside of replays and recordings.
        kinds, marked: Kinds of the steps, and of those that core marked.
        num_replays, num_captures: Numbers of replays and of recordings.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outside, self.kinds, self.marked = Counter[str](), Counter[StepKind](), Counter[StepKind]()
        self.num_replays = self.num_captures = 0
        self._is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_copy = name in ("copy_", "_copy_from", "_to_copy", "clone", "detach", "alias") or "empty" in name
        is_memory_limit = name == "open"  # set at the end of each step: no kernel
        if not (self._is_inside or is_copy or is_memory_limit or func.is_view):
            self.outside[name] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts in the steps of this context."""
        from mvllm_example_device.replay import ExampleGraphs, Recording

        execute, build = ModelRunner.execute_model, StepInputBuilder.build
        replay, capture = Recording.__call__, ExampleGraphs.capture

        def execute_model(runner: Any, plan: Any) -> Any:
            with self:
                return execute(runner, plan)

        def build_inputs(builder: Any, plan: Any) -> Any:
            inputs = build(builder, plan)
            self.kinds[inputs.layout.kind] += 1
            self.marked[inputs.layout.kind] += inputs.layout.capture
            return inputs

        def run_again(recording: Any) -> None:
            self._is_inside, self.num_replays = True, self.num_replays + 1
            replay(recording)
            self._is_inside = False

        def record(graphs: Any, step: Any) -> Any:
            self._is_inside, self.num_captures = True, self.num_captures + 1
            recorded = capture(graphs, step)
            self._is_inside = False
            return recorded

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelRunner, "execute_model", execute_model)
            patch.setattr(StepInputBuilder, "build", build_inputs)
            patch.setattr(Recording, "__call__", run_again)
            patch.setattr(ExampleGraphs, "capture", record)
            yield


def requests_of(kind: str, folder: Path, model: Path) -> tuple[dict[str, Any], Callable[[LLM], list[list[int]]]]:
    """Settings of the engine, and a function that generates tokens."""
    _, _, prompts, settings = KINDS[kind]
    settings, adapters = dict(settings), None
    if "lora" in kind:
        targets = ("q_proj", "up_proj")
        paths = [write_adapter(folder / f"{kind}{i}", model, targets=targets, seed=i) for i in (1, 2)]
        known = [LoRARequest(f"adapter {i}", i, str(path)) for i, path in enumerate(paths, 1)]
        adapters = [known[0], None, known[1]][: len(prompts)]
        settings |= {"enable_lora": True, "max_loras": 2}
    grammar = StructuredOutputsParams(regex="[a-f]{40}") if "structured" in kind else None
    params = [
        SamplingParams(max_tokens=14, temperature=0, ignore_eos=True, structured_outputs=None if i % 2 else grammar)
        for i in range(len(prompts))
    ]

    def run(llm: LLM) -> list[list[int]]:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(given, params, use_tqdm=False, lora_request=adapters)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return settings, run


def check(kind: str, folder: Path) -> None:
    """The tokens, and the accepted drafts of a module, are those of the CPU platform, and in steady state nothing but
    replays and copies runs."""
    name, wanted, _, _ = KINDS[kind]
    model = folder / name
    if "mtp" in kind:
        model = reference(name, "near").folder
    elif not model.exists():
        make_checkpoint(name, model)
    settings, run = requests_of(kind, folder, model)
    with LLM(str(model), platform="cpu", **(SETTINGS | settings)) as llm:
        expected, drafts = run(llm), acceptance(llm)
    with LLM(str(model), platform="example", **(SETTINGS | settings)) as llm:
        assert run(llm) == expected, "the first time, when some shapes are captured"
        assert "mtp" not in kind or acceptance(llm) == drafts != (0, 0)
        launches = Launches()
        with launches.counted():
            assert run(llm) == expected
    assert launches.kinds[wanted] and sum(launches.kinds.values()) > 5, launches.kinds
    assert launches.marked == launches.kinds, (launches.marked, launches.kinds)
    # The passes of a draft module are replayed, too; its logits are computed outside.
    num_passes = NUM_DRAFTS if "mtp" in kind else 0
    assert launches.num_replays == (2 + num_passes) * sum(launches.kinds.values()), "the model and the head of a step"
    assert num_passes or not launches.outside, launches.outside
    # Which requests are in a step depends on how fast grammars are compiled.
    assert launches.num_captures == 0 or "structured" in kind, "all shapes were captured the first time"


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for kind in sys.argv[1:]:
            check(kind, Path(folder))
            print(kind, "replays everything", flush=True)


if __name__ == "__main__":
    main()
