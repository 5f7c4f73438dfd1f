"""Speculative decoding: acceptance rate and tokens per second, compared with the engine without it.

    python -m tests.perf.speculative [--padded] [--model demo] [--draft FOLDER] [--runs 3] [--threads 1]
    python -m tests.perf.speculative --model FILE.gguf --dtype bfloat16 --temperature 0 --work edit batch \
        --config '{"method": "suffix", "num_speculative_tokens": 16}'

One request at a time, float32. There are three workloads, each with greedy sampling and at temperature 0.8: stories
whose text is not in the prompt, stories that the prompt already contains, as when a text is quoted or edited, and JSON
by a schema. `--work` names others: `edit`, a source file of 200 lines in the prompt that the answer repeats; `batch`,
32 stories at once; and `chat`, the prompts that ci/draft_heads holds out of training. The engines alternate in one
process; the table shows medians. Every engine's tokens are compared with those of the first; a difference ends the run,
except where rounding depends on the number of tokens in a step: in a batch, and in other dtypes than float32.

`--config` gives a setting `speculative_config` of its own, and may be repeated; without it the engines have n-grams and
a draft model. Their number of draft tokens is fixed, unless it says `"adaptive": true`.

Without `--draft` and for the demo model, a one-layer draft model is trained first, from the demo's corpus and with its
tokenizer, which takes a minute. `--draft demo` drafts with the target model itself: all drafts are accepted and nothing
is gained, which shows the cost of a draft pass.

`--padded` makes the demo model's MLPs 24 times as wide, with zeros: it generates the same tokens, and reads 36 million
weights per step, like a model large enough to benefit from speculative decoding.

`--llama-cpp PYTHON` measures llama.cpp beside the engines, of an environment with llama-cpp-python, on the same GGUF
file (`--llama-cpp-model`, if it is not `--model`): without drafts, and with its own n-gram drafts of 3 and 8 tokens.

`--rows 1 2 4 8` measures what verification costs: milliseconds of a step that verifies so many tokens less one, each of
which is wrong, and nothing else.

The table shows the speed-up next to its upper bound, the tokens per step.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ci.draft_heads.prompts import HELD_OUT, SEED, prompts
from mvllm import LLM, SamplingParams, StructuredOutputsParams
from mvllm.config.hub import find_model
from mvllm.messages.requests import SchedulerStats
from mvllm.worker.spec_decode.ngram import NgramProposer

BEGINNINGS = (
    "Once upon a time",
    "One day, a fox",
    "There was a little bear who",
    "In a small house by the sea",
    "Anna had a",
    "The old owl",
)
TOKENS = 128
DRAFT_STEPS = 600
SCHEMA = {
    "type": "array",
    "minItems": 20,
    "items": {
        "type": "object",
        "properties": {"name": {"enum": ["fox", "bear", "owl"]}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}
PADDING = 24
MANY = 32
WORK = ("stories", "copied", "json", "edit", "batch", "chat")
NUM_CHATS = 8
LLAMA_CPP_DRAFTS = (0, 3, 8)


def train_draft(folder: Path) -> None:
    """Trains a one-layer model with the demo model's tokenizer on its corpus."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from ci.demo_model import train
    from mvllm.demo import demo_model_path

    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    torch.manual_seed(train.SEED)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=None,
        )
    )
    model.set_attn_implementation("eager")
    folder.mkdir()
    train.train(model, tokenizer, folder, DRAFT_STEPS, 5.0)
    train.save_model(model, tokenizer, folder)


def pad(folder: Path) -> None:
    """The demo model with wider MLPs, whose new weights are zeros."""
    from safetensors.torch import load_file, save_file

    demo = Path(find_model("demo", revision=None, token=None, trust_remote_code=False, with_weights=True))
    shutil.copytree(demo, folder, dirs_exist_ok=True)
    config = json.loads((demo / "config.json").read_text())
    width = PADDING * config["intermediate_size"]
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": width}))
    weights = load_file(demo / "model.safetensors")
    for name, weight in weights.items():
        dim = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}.get(name.split(".")[-2])
        if dim is not None:
            shape = list(weight.shape)
            shape[dim] = width - shape[dim]
            weights[name] = torch.cat((weight, torch.zeros(shape, dtype=weight.dtype)), dim)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def prompts_of(llm: LLM, copied: bool) -> list[list[int]]:
    """The beginnings of stories; if `copied`, preceded by the whole stories."""
    tokenizer = llm.get_tokenizer()
    begun = [tokenizer.encode(text) for text in BEGINNINGS]
    if not copied:
        return begun
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    told = llm.generate(list(begun), params, use_tqdm=False)
    return [ids + list(output.outputs[0].token_ids) + ids for ids, output in zip(begun, told, strict=True)]


def file_to_edit(llm: LLM) -> list[list[int]]:
    """A prompt with a source file of 200 lines, which is then to be written again with its first lines given."""
    lines = Path(argparse.__file__).read_text(encoding="utf-8").splitlines()[100:300]
    text = "\n".join(lines)
    tokenizer = llm.get_tokenizer()
    ids: list[int] = tokenizer.encode(f"```python\n{text}\n```\nThe same file:\n```python\n" + "\n".join(lines[:12]))
    return [ids]


def work_prompts(llm: LLM, work: str) -> list[list[int]]:
    """The prompts of a workload."""
    if work == "edit":
        return file_to_edit(llm)
    if work == "chat":
        asked = [prompt for i, prompt in enumerate(prompts(random.Random(SEED))) if i % HELD_OUT == 0][:NUM_CHATS]
        return [
            llm.get_tokenizer().apply_chat_template(
                [{"role": "user", "content": each}], add_generation_prompt=True, return_dict=False
            )
            for each in asked
        ]
    begun = prompts_of(llm, work == "copied")
    return [begun[i % len(begun)] for i in range(MANY)] if work == "batch" else begun


def run(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, *, at_once: bool = False
) -> tuple[list[list[int]], float]:
    """The tokens that follow each prompt, one prompt at a time or all at once, and the seconds."""
    llm.reset_prefix_cache()
    start, tokens = time.perf_counter(), []
    for some in [prompts] if at_once else [[ids] for ids in prompts]:
        tokens += [list(output.outputs[0].token_ids) for output in llm.generate(some, params, use_tqdm=False)]
    return tokens, time.perf_counter() - start


def difference(after: SchedulerStats, before: SchedulerStats) -> tuple[int, int, int]:
    """Numbers of drafts, draft tokens and accepted tokens between two states of the counters."""
    return (
        after.num_drafts - before.num_drafts,
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
    )


def stats_of(llm: LLM) -> SchedulerStats:
    """The engine's counters as of now."""
    return llm.llm_engine.stats or SchedulerStats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--padded", action="store_true", help="the demo model at the cost of a larger one")
    parser.add_argument("--draft", help="a draft model's folder")
    parser.add_argument("--config", action="append", default=[], help="a speculative_config, as JSON")
    parser.add_argument("--work", nargs="+", choices=WORK, default=WORK[:3])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2, 4], help="tokens of a draft")
    parser.add_argument("--max-tokens", type=int, default=TOKENS, help="tokens of an answer")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, nargs="+", help="only the cost of verification")
    parser.add_argument("--llama-cpp", help="the Python of an environment with llama-cpp-python")
    parser.add_argument("--llama-cpp-model", help="its GGUF file; --model by default")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if args.padded:
            model = str(Path(folder) / "padded")
            pad(Path(model))
        settings = {"dtype": args.dtype, "max_num_seqs": MANY, "kv_cache_memory_bytes": 512 << 20}
        if args.rows:
            measure_verification(model, args.rows, args.runs, settings)
            return
        engines = {
            way: LLM(model, speculative_config=config, use_tqdm_on_load=False, **settings)
            for way, config in ways_of(args, Path(folder)).items()
        }
        print(f"{'work':22} {'drafts':24} {'right':>7} {'tokens per step':>16} {'speed-up':>9}")
        for work in args.work:
            prompts = work_prompts(engines["nothing"], work)
            form = StructuredOutputsParams(json=SCHEMA) if work == "json" else None
            for temperature in args.temperature:
                params = SamplingParams(
                    temperature=temperature,
                    seed=1,
                    max_tokens=args.max_tokens,
                    ignore_eos=True,
                    detokenize=False,
                    structured_outputs=form,
                )
                name = f"{work}, T {temperature}"
                exact = args.dtype == "float32" and work != "batch"
                others = llama_cpp_runs(args, prompts) if not (temperature or form or work == "batch") else {}
                measure(engines, prompts, params, args.runs, name, others, at_once=work == "batch", exact=exact)


def measure_verification(model: str, rows: list[int], runs: int, settings: dict[str, Any]) -> None:
    """Prints the milliseconds of steps with so many rows of one request. The draft tokens cost nothing."""
    NgramProposer.propose = lambda self, step: [[0] * step.num_tokens for _ in step.rows]  # type: ignore[method-assign]
    engines = {}
    for count in rows:
        config = {"method": "ngram", "num_speculative_tokens": count - 1, "adaptive": False} if count > 1 else None
        engines[count] = LLM(model, speculative_config=config or {"method": "none"}, use_tqdm_on_load=False, **settings)
    prompts = prompts_of(engines[rows[0]], False)[:1]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    found: dict[int, list[float]] = {count: [] for count in rows}
    for _ in range(runs + 1):  # the first is not counted: it records the steps
        for count, llm in engines.items():
            before = stats_of(llm)
            tokens, seconds = run(llm, prompts, params)
            _, _, accepted = difference(stats_of(llm), before)
            found[count].append(1e3 * seconds / (len(tokens[0]) - accepted))
    first = statistics.median(found[rows[0]][1:])
    print("rows  ms a step  beside the first")
    for count, milliseconds in found.items():
        median = statistics.median(milliseconds[1:])
        print(f"{count:4} {median:10.2f} {median / first:17.2f}")


def ways_of(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """The engines to compare: their names in the table, and their `speculative_config`."""
    ways: dict[str, dict[str, Any]] = {"nothing": {"method": "none"}}
    for text in args.config:
        config = {"adaptive": False, **json.loads(text)}
        ways[f"{config.get('method', 'draft model')}, {config.get('num_speculative_tokens', '')}"] = config
    if args.config:
        return ways
    draft = args.draft
    if draft is None and args.model == "demo":
        train_draft(folder / "draft")
        draft = str(folder / "draft")
    for count in args.tokens:
        ways[f"ngram, {count}"] = {"method": "ngram", "num_speculative_tokens": count, "adaptive": False}
    for count in args.tokens if draft is not None else ():
        ways[f"draft model, {count}"] = {"model": draft, "num_speculative_tokens": count, "adaptive": False}
    return ways


def measure(
    engines: dict[str, LLM],
    prompts: list[list[int]],
    params: SamplingParams,
    runs: int,
    work: str,
    others: dict[str, Callable[[], tuple[float, float]]],
    *,
    at_once: bool,
    exact: bool,
) -> None:
    """Prints the rows of one work. `others` are runs of other engines: they return seconds and tokens per step."""
    others_found: dict[str, list[tuple[float, float]]] = {way: [] for way in others}
    seconds: dict[str, list[float]] = {way: [] for way in engines}
    expected, rows = None, {}
    for _ in range(runs + 1):  # the first is not counted: it records the steps
        for way, llm in engines.items():
            before = stats_of(llm)
            tokens, taken = run(llm, prompts, params, at_once=at_once)
            seconds[way].append(taken)
            rows[way] = difference(stats_of(llm), before)
            expected = expected or tokens
            if exact and tokens != expected:
                sys.exit(f"{work}: drafts of {way} have changed the tokens.")
        for way, run_other in others.items():
            others_found[way].append(run_other())
    plain = statistics.median(seconds["nothing"][1:])
    generated = sum(map(len, expected or ()))
    for way, (_, guessed, right) in rows.items():
        share = f"{right / guessed:.0%}" if guessed else "-"
        per_step = generated / (generated - right)
        speed_up = plain / statistics.median(seconds[way][1:])
        print(f"{work:22} {way:24} {share:>7} {per_step:16.2f} {speed_up:8.2f}x")
    for way, runs_found in others_found.items():
        taken, rates = zip(*runs_found[1:], strict=True)
        print(f"{work:22} {way:24} {'':>7} {rates[0]:16.2f} {plain / statistics.median(taken):8.2f}x")


def llama_cpp_runs(args: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Callable[[], tuple[float, float]]]:
    """Runs of llama.cpp by their names in the table; none without `--llama-cpp`."""
    if args.llama_cpp is None:
        return {}
    script = Path(__file__).parent / "cpu_bench" / "runners" / "llama_cpp_drafts.py"

    def run_once(num_drafts: int) -> tuple[float, float]:
        asked = {"model": args.llama_cpp_model or args.model, "threads": args.threads, "prompts": prompts}
        asked |= {"num_tokens": args.max_tokens, "num_drafts": num_drafts}
        ended = subprocess.run(
            [args.llama_cpp, str(script)], input=json.dumps(asked), capture_output=True, text=True, check=True
        )
        found = json.loads(ended.stdout.splitlines()[-1])
        return found["seconds"], sum(map(len, found["tokens"])) / found["num_steps"]

    return {
        f"llama.cpp, {f'n-grams, {number}' if number else 'nothing'}": partial(run_once, number)
        for number in LLAMA_CPP_DRAFTS
    }


if __name__ == "__main__":
    main()
