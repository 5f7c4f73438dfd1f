"""Benchmarks of the engine beside the device's limits, measured in the same run.

    ceilings       bytes per second of a copy on the device and of reading alone, operations per second of a product in
                   bfloat16
    MODEL:engine   decode steps, prompts, gaps on the device, offline throughput: one engine, one start
    MODEL:peer     the same requests with transformers' continuous batching
    MODEL:serving  latencies through the HTTP server, under requests that come at random times

Everything runs in bfloat16, greedy, without an end of text, and without hits in the prefix cache.
"""

from __future__ import annotations

import random
import statistics
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.gpu.models import CONFIGS, Size, prepare_model
from tests.gpu.result_log import FAILED, MEASURED, ResultLog, Row
from tests.gpu.settings import Item, Settings

if TYPE_CHECKING:
    from mvllm import LLM

Requests = list[tuple[list[int], int]]
"""Prompts, and how many output tokens each wants."""
FIRST_TOKEN_ID = 2
BUDGET_PER_STEP = 8192  # tokens


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        batches: Of decode steps.
        context: Tokens of each prompt before them.
        steps: How many are timed.
        prompts: Lengths of prompts that are timed alone.
        requests: Of the offline throughput; a peer gets `peer_requests` of them.
        rates: Requests per second through the server.
        served: Requests at each rate, of `served_lengths` tokens in and out.
        trace_batches: Requests of the steps that are traced.
        most_output: Tokens that a request of the offline throughput may want.
    """

    batches: tuple[int, ...] = (1, 16, 64, 256)
    context: int = 512
    steps: int = 64
    prompts: tuple[int, ...] = (2048, 8192, 32768)
    requests: int = 1000
    peer_requests: int = 200
    rates: tuple[float, ...] = (4.0, 16.0)
    served: int = 128
    served_lengths: tuple[int, int] = (512, 128)
    trace_batches: tuple[int, ...] = (1, 64)
    most_output: int = 2048


FULL = Plan()
QUICK = Plan(
    batches=(1, 4),
    context=24,
    steps=8,
    prompts=(96,),
    requests=12,
    peer_requests=4,
    rates=(20.0,),
    served=6,
    served_lengths=(12, 6),
    trace_batches=(4,),
    most_output=16,
)


def plan_of(settings: Settings) -> Plan:
    """How much this run measures."""
    return QUICK if settings.quick else FULL


def items(settings: Settings) -> list[Item]:
    """The largest dense model first, as targets are about it."""
    ceilings = Item("ceilings", 8, 90)
    if settings.quick:
        kinds = [("tiny", 4, 1), ("tiny-experts", 4, 1)]
    else:
        kinds = [("llama-3.1-8b", 60, 5), ("qwen3-0.6b", 60, 3), ("qwen3-30b-a3b", 200, 8)]
    found = [ceilings]
    for name, needs, times in kinds:
        found.append(Item(f"{name}:engine", needs, 100 * times))
        if "num_experts" not in CONFIGS[name]:
            found += [Item(f"{name}:serving", needs, 60 * times), Item(f"{name}:peer", needs, 60 * times)]
    return found


def run(item: str, settings: Settings, result_log: ResultLog) -> None:
    """See the module."""
    if item == "ceilings":
        measure_ceilings(settings, result_log)
        return
    name, _, what = item.partition(":")
    folder, load_format = prepare_model(name, settings.scratch / "models")
    if what == "engine":
        _engine(name, folder, load_format, item, settings, result_log)
    elif what == "serving":
        from tests.gpu.serving import measure_serving

        measure_serving(name, folder, item, plan_of(settings), settings, result_log)
    else:
        from tests.gpu.peer import measure_peer

        measure_peer(name, folder, item, plan_of(settings), settings, result_log)


def measure_ceilings(settings: Settings, result_log: ResultLog) -> tuple[float, float]:
    """Bytes per second of a copy, and operations per second of a product, measured now."""
    from tests.gpu.device import copy_bandwidth, matmul_rate, open_device, read_bandwidth

    num_bytes, size = (16 << 20, 256) if settings.quick else (4 << 30, 8192)
    with open_device(settings.platform) as runtime:
        copied, multiplied = copy_bandwidth(runtime, num_bytes), matmul_rate(runtime, size)
        read = read_bandwidth(runtime, num_bytes)
    figures = {"copy_gb_s": copied / 1e9, "read_gb_s": read / 1e9, "matmul_tflop_s": multiplied / 1e12}
    note = (
        f"copies and reductions of {num_bytes >> 20} MiB, read and written bytes; bfloat16 products of {size} x {size}"
    )
    result_log.add(Row("bench", "ceilings", "ceilings", MEASURED, figures, note))
    return copied, multiplied


def ceilings(settings: Settings, result_log: ResultLog) -> tuple[float, float]:
    """Those of this run."""
    known = result_log.figures("bench", "ceilings")
    if known:
        return float(known["copy_gb_s"] or 0) * 1e9, float(known["matmul_tflop_s"] or 0) * 1e12
    return measure_ceilings(settings, result_log)


def engine_arguments(name: str, settings: Settings, plan: Plan) -> dict[str, Any]:
    """Of every engine and server here."""
    longest = max(max(plan.prompts) + 8, 2048 + 8, plan.context + plan.steps + 64)
    found = {
        "platform": settings.platform,
        "dtype": "bfloat16",
        "max_model_len": min(longest, CONFIGS[name]["max_position_embeddings"]),
        "max_num_seqs": max(plan.batches),
        "max_num_batched_tokens": BUDGET_PER_STEP,
        "enable_prefix_caching": False,
    }
    small = {"kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 256}
    return found | (small if settings.quick else {})


def open_engine(name: str, folder: Path, load_format: str, settings: Settings, plan: Plan) -> LLM:
    """An engine in this process on a prepared checkpoint, without a tokenizer."""
    from mvllm import LLM

    return LLM(
        model=str(folder),
        load_format=load_format,
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        distributed_executor_backend="uni",
        **engine_arguments(name, settings, plan),
    )


def _engine(name: str, folder: Path, load_format: str, item: str, settings: Settings, result_log: ResultLog) -> None:
    from tests.gpu.trace import trace_prompt, trace_steps

    limits = ceilings(settings, result_log)
    plan, size = plan_of(settings), Size.of(CONFIGS[name])
    begin = time.perf_counter()
    with open_engine(name, folder, load_format, settings, plan) as llm:
        start = {"start_s": time.perf_counter() - begin}
        result_log.add(Row("bench", item, f"{name}: start", MEASURED, start, str(llm.llm_engine.cache_summary)))
        measures: list[tuple[str, Callable[[], tuple[dict[str, float], str]]]] = [
            *(
                (f"decode, batch {batch}", partial(measure_decode, llm, batch, plan, size, limits))
                for batch in plan.batches
            ),
            *(
                (f"prompt of {length}", partial(measure_prompt, llm, length, size, limits[1]))
                for length in plan.prompts
            ),
            (f"trace of a prompt of {plan.prompts[-1]}", partial(trace_prompt, llm, name, plan, size, settings)),
            *(
                (f"steps at batch {batch}", partial(trace_steps, llm, name, batch, plan, size, settings))
                for batch in plan.trace_batches
            ),
            ("offline throughput", partial(_offline, llm, plan, size)),
            ("the same as transformers", partial(_same_as_peer, llm, plan, size)),
        ]
        for title, measure in measures:
            try:
                figures, note = measure()
            except Exception as e:  # costs no other figure
                traceback.print_exc()
                result_log.add(Row("bench", item, f"{name}: {title}", FAILED, note=f"{type(e).__name__}: {e}"))
            else:
                result_log.add(Row("bench", item, f"{name}: {title}", MEASURED, figures, note))


def measure_decode(
    llm: LLM, batch: int, plan: Plan, size: Size, limits: tuple[float, float]
) -> tuple[dict[str, float], str]:
    """Decode steps of `batch` requests beside their bounds: figures, and a note."""
    for _ in decoding_steps(llm, batch, plan.context, 4, size.vocab):
        pass  # what is compiled late is compiled now
    seconds, context = decode_seconds(llm, batch, plan, size.vocab)
    floor = size.step_seconds(batch, context, *limits)
    figures = {
        "step_ms": seconds * 1e3,
        "tokens_s": batch / seconds,
        "floor_ms": floor * 1e3,
        "of_floor": floor / seconds,
        "of_bandwidth": size.step_bytes(batch, context) / limits[0] / seconds,
    }
    return figures, f"context {context:.0f}"


def measure_prompt(llm: LLM, length: int, size: Size, multiplied: float) -> tuple[dict[str, float], str]:
    """A prompt of `length` tokens beside the bound of its operations: figures, and a note."""
    seconds = prompt_seconds(llm, length, size.vocab)
    rate = size.prompt_operations(length) / seconds
    return {"ms": seconds * 1e3, "tokens_s": length / seconds, "of_matmul_rate": rate / multiplied}, ""


def _offline(llm: LLM, plan: Plan, size: Size) -> tuple[dict[str, float], str]:
    requests = chat_requests(plan.requests, size.vocab, plan)
    throughput(llm, requests[:16])  # what is compiled late is compiled now
    return throughput(llm, requests), ""


def _same_as_peer(llm: LLM, plan: Plan, size: Size) -> tuple[dict[str, float], str]:
    prompts, length = alike_requests(plan, size.vocab)
    return throughput(llm, [(prompt, length) for prompt in prompts]), f"{length} output tokens each"


def decode_seconds(llm: LLM, batch: int, plan: Plan, vocab: int) -> tuple[float, float]:
    """Seconds of a decode step, the median, and the tokens in the cache of each request in the middle of them."""
    times, before = [], 0.0
    for _ in decoding_steps(llm, batch, plan.context, plan.steps + 1, vocab):
        now = time.perf_counter()
        if before:
            times.append(now - before)
        before = now
    return statistics.median(times), plan.context + prefill_steps(batch, plan.context) / 2 + plan.steps / 2


def prefill_steps(batch: int, context: int) -> int:
    """Steps after which all of `batch` prompts are computed, and the first step of decoding is over, too."""
    return -(-batch * context // (BUDGET_PER_STEP - batch)) + 4


def decoding_steps(llm: LLM, batch: int, context: int, count: int, vocab: int) -> Generator[None, None, None]:
    """Runs `count` steps in each of which all of `batch` requests get a token; gives way after each.

    Tokens are read at the end only, as in offline use, so that reading adds nothing to the steps.
    """
    from mvllm import SamplingParams
    from mvllm.messages.sampling_params import RequestOutputKind

    engine, before = llm.llm_engine, prefill_steps(batch, context)
    params = SamplingParams(
        temperature=0,
        max_tokens=before + count + 4,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    ids = [f"decode-{i}" for i in range(batch)]
    for request_id, prompt in zip(ids, random_prompts(batch, context, vocab, seed=batch), strict=True):
        engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
    try:
        for _ in range(before):
            engine.step()
        for _ in range(count):
            assert not engine.step(), "a request has ended too early"
            yield
        stats = engine.stats
        assert stats is not None and stats.num_running == batch, f"of {batch} requests not all ran at once: {stats}"
    finally:
        engine.abort_request(ids)
        while engine.has_unfinished_requests():
            engine.step()


def prompt_seconds(llm: LLM, length: int, vocab: int, rounds: int = 3) -> float:
    """Seconds from a prompt to its first token, the median, after one round that is not counted."""
    from mvllm import SamplingParams
    from mvllm.messages.inputs import TokensPrompt

    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    found = []
    for seed in range(rounds + 1):
        [prompt] = random_prompts(1, length, vocab, seed=1000 + seed)
        begin = time.perf_counter()
        llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])


def throughput(llm: LLM, requests: Requests) -> dict[str, float]:
    """All requests at once: tokens per second until the last is done."""
    from mvllm import SamplingParams
    from mvllm_bench.datasets import SampleRequest
    from mvllm_bench.offline import measure_throughput

    samples = [SampleRequest("", tuple(prompt), length) for prompt, length in requests]
    params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False)
    found = measure_throughput(llm.llm_engine, samples, params)
    names = ("num_requests", "elapsed_time", "requests_per_second", "output_tokens_per_second", "tokens_per_second")
    return {name: found[name] for name in names}


def alike_requests(plan: Plan, vocab: int) -> tuple[list[list[int]], int]:
    """Prompts of the first of `chat_requests`, and one number of output tokens for all: their mean.

    That is what transformers can be asked for.
    """
    requests = chat_requests(plan.peer_requests, vocab, plan)
    return [prompt for prompt, _ in requests], round(statistics.mean(output for _, output in requests))


def chat_requests(count: int, vocab: int, plan: Plan) -> Requests:
    """Prompts and numbers of output tokens, spread as in conversations with a chat model.

    Logarithms are normal: prompts have 70 tokens in the middle and about 220 on average, answers 120 and about 200.
    As usual with such files, a prompt has at most 1,024 tokens, and both together 2,048.
    """
    rng = random.Random(11)
    found = []
    for _ in range(count):
        length = min(1024, max(4, round(rng.lognormvariate(4.25, 1.5))))
        output = min(2048 - length, plan.most_output, max(4, round(rng.lognormvariate(4.8, 1.0))))
        found.append(([rng.randrange(FIRST_TOKEN_ID, vocab) for _ in range(length)], output))
    return found


def random_prompts(count: int, length: int, vocab: int, *, seed: int) -> Sequence[list[int]]:
    """Prompts of random token ids."""
    rng = random.Random(seed)
    return [[rng.randrange(FIRST_TOKEN_ID, vocab) for _ in range(length)] for _ in range(count)]
