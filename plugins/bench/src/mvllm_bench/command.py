"""`mvllm bench`: benchmarks of an engine, of a running server, and of settings (sweep)."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from mvllm.extension_api import ConfigError, MvllmError
from mvllm.extension_api.cli import engine_args
from mvllm.extension_api.openai_client import authorization_headers
from mvllm_bench.arguments import (
    SAMPLING_OPTIONS,
    add_latency_arguments,
    add_serve_arguments,
    add_startup_arguments,
    add_sweep_arguments,
    add_throughput_arguments,
)
from mvllm_bench.datasets import WITH_IMAGES
from mvllm_bench.metrics import GOODPUT_METRICS, METRICS

if TYPE_CHECKING:
    from mvllm.extension_api import SamplingParams
    from mvllm_bench.client import ServerEndpoint
    from mvllm_bench.datasets import BenchmarkTokenizer, SampleRequest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a subcommand for each benchmark."""
    benchmarks = parser.add_subparsers(title="benchmarks", dest="benchmark", metavar="BENCHMARK", required=True)
    for name, (summary, add, _) in _BENCHMARKS.items():
        add(
            benchmarks.add_parser(
                name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False
            )
        )


def run(args: argparse.Namespace) -> int:
    """Runs a benchmark and prints its result; writes it to a file on request."""
    status: int = _BENCHMARKS[args.benchmark][2](args)
    return status


# --- benchmarks


def _run_throughput(args: argparse.Namespace) -> int:
    from mvllm.extension_api.engine import LLM
    from mvllm_bench.offline import measure_throughput

    settings = engine_args(args)
    if args.dataset_name == WITH_IMAGES:
        raise ConfigError(f"The dataset {WITH_IMAGES!r} is for `mvllm bench serve`.")
    samples = _samples(args, _tokenizer(settings.tokenizer or settings.model))
    with LLM.from_engine_args(settings) as llm, _progress_bar(args, len(samples)) as bar:
        params = _params(_ignores_eos(args))
        result = measure_throughput(llm.llm_engine, samples, params, on_done=lambda num_tokens: bar.update(1))
        where = llm.llm_engine.platform_summary
    titles = {
        "Requests": "num_requests",
        "Duration (s)": "elapsed_time",
        "Input tokens": "total_input_tokens",
        "Output tokens": "total_output_tokens",
        "Requests per second": "requests_per_second",
        "Tokens per second": "tokens_per_second",
        "Output tokens per second": "output_tokens_per_second",
    }
    rows = [(title, result[key]) for title, key in titles.items()]
    return _report(args, "Throughput", rows, result, where)


def _run_latency(args: argparse.Namespace) -> int:
    from mvllm.extension_api.engine import LLM
    from mvllm_bench.offline import measure_latency

    settings = engine_args(args)
    with (
        LLM.from_engine_args(settings) as llm,
        _progress_bar(args, args.num_iters_warmup + args.num_iters) as bar,
    ):
        result = measure_latency(
            llm.llm_engine,
            input_len=args.input_len,
            output_len=args.output_len,
            batch_size=args.batch_size,
            num_iters_warmup=args.num_iters_warmup,
            num_iters=args.num_iters,
            params=_params(True),
            seed=args.seed,
            on_done=bar.update,
        )
        where = llm.llm_engine.platform_summary
    rows: list[tuple[str, object]] = [
        ("Average latency (s)", f"{result['avg_latency']:.4f}"),
        *((f"{p}% percentile latency (s)", f"{value:.4f}") for p, value in result["percentiles"].items()),
        ("Output tokens per second", result["output_tokens_per_second"]),
    ]
    title = f"Latency of {args.batch_size} x ({args.input_len} in, {args.output_len} out)"
    return _report(args, title, rows, result, where)


def _run_startup(args: argparse.Namespace) -> int:
    from mvllm_bench.startup import measure_one_startup, measure_startup

    settings = engine_args(args)
    settings.create_model_config()  # reports invalid settings before the first start
    with _progress_bar(args, args.num_iters_warmup + args.num_iters) as bar:
        for _ in range(args.num_iters_warmup):
            measure_one_startup(settings)
            bar.update()
        result = measure_startup(settings, args.num_iters, on_done=bar.update)
    phases = result["phases"]
    rows: list[tuple[str, object]] = [
        ("Average startup time (s)", result["avg_startup_time"]),
        *((f"{p}% percentile startup time (s)", v) for p, v in result["startup_percentiles"].items()),
        ("Average time to the first token (s)", result["avg_first_token_time"]),
        *((f"  {name} (s)", sum(run[name] for run in phases) / len(phases)) for name in phases[0]),
    ]
    return _report(args, "Startup", rows, result)


def _run_serve(args: argparse.Namespace) -> int:
    import dataclasses

    from mvllm.extension_api.openai_client import run_in_event_loop
    from mvllm_bench.metrics import calculate_metrics, per_request_details
    from mvllm_bench.report import format_serving_table
    from mvllm_bench.server_benchmark import DEFAULT_MAX_CONCURRENCY, LoadPattern, get_first_model, run_benchmark

    selected = _names(args.percentile_metrics)
    percentiles = _percentiles(args.metric_percentiles)
    goodput = None if args.goodput is None else _limits(args.goodput)
    metadata = _pairs("--metadata", args.metadata)
    target = _target(args)
    if not target.model:
        target = dataclasses.replace(target, model=run_in_event_loop(get_first_model(target)))
    name = args.tokenizer or target.model
    tokenizer = None if name == "none" or not _needs_tokenizer(args) else _tokenizer_of_server(name)
    if args.dataset_name == WITH_IMAGES and not target.chat:
        raise ConfigError(f"The dataset {WITH_IMAGES!r} sends pictures in messages. Add --endpoint-type openai-chat.")
    samples = _samples(args, tokenizer)
    max_concurrency = args.max_concurrency
    if max_concurrency is None and math.isinf(args.request_rate) and len(samples) > DEFAULT_MAX_CONCURRENCY:
        max_concurrency = DEFAULT_MAX_CONCURRENCY
        print(f"At most {max_concurrency} requests are sent at a time (--max-concurrency).", file=sys.stderr)
    load = LoadPattern(args.request_rate, args.burstiness, max_concurrency, args.num_warmups, args.seed)
    with _progress_bar(args, len(samples)) as bar:
        run = run_in_event_loop(
            run_benchmark(
                target,
                samples,
                load,
                tokenizer=tokenizer,
                ready_timeout=args.ready_check_timeout_sec,
                on_done=lambda result: bar.update(),
            )
        )
    result = calculate_metrics(run.results, run.duration, percentiles=percentiles, selected=selected, goodput=goodput)
    print(format_serving_table(result, percentiles, selected))
    _print_errors([request.error for request in run.results if request.error is not None])
    if args.save_result or args.append_result or args.save_detailed or args.result_filename:
        settings = {
            "model_id": target.model,
            "tokenizer_id": name if tokenizer is not None else None,
            "num_prompts": args.num_prompts,
            **metadata,
            "burstiness": args.burstiness,
            "max_concurrency": max_concurrency,
        }
        details = per_request_details(run.results) if args.save_detailed else {}
        _write_serving_result(args, settings, {**result, **details})
    return 0 if result["completed"] else 1


def _run_sweep(args: argparse.Namespace) -> int:
    from mvllm_bench.sweep_command import run_sweep

    goodput = None if args.goodput is None else _limits(args.goodput)
    return run_sweep(args, goodput, _ignores_eos(args))


_Add = Callable[[argparse.ArgumentParser], None]
_Run = Callable[[argparse.Namespace], int]
_BENCHMARKS: dict[str, tuple[str, _Add, _Run]] = {
    "serve": ("measure any OpenAI-compatible server under load", add_serve_arguments, _run_serve),
    "throughput": ("measure the tokens per second of an engine", add_throughput_arguments, _run_throughput),
    "latency": ("measure the latency of a batch", add_latency_arguments, _run_latency),
    "startup": ("measure the startup time of an engine", add_startup_arguments, _run_startup),
    "sweep": ("find the fastest settings on this machine and write them to a file", add_sweep_arguments, _run_sweep),
}


# --- shared parts


def _needs_tokenizer(args: argparse.Namespace) -> bool:
    """Whether the dataset needs a tokenizer. Servers count tokens, so the built-in prompts need none."""
    return args.dataset_name != "builtin" or args.tokenizer is not None


def _tokenizer(name: str) -> BenchmarkTokenizer:
    from mvllm_bench.datasets import BenchmarkTokenizer

    return BenchmarkTokenizer(name)


def _tokenizer_of_server(name: str) -> BenchmarkTokenizer:
    try:
        return _tokenizer(name)
    except MvllmError as e:
        raise ConfigError(
            f"{e}\nThe tokenizer of the server's model cannot be read: name one with --tokenizer, or use "
            "--dataset-name builtin --tokenizer none."
        ) from e


def _samples(args: argparse.Namespace, tokenizer: BenchmarkTokenizer | None) -> list[SampleRequest]:
    from mvllm_bench.datasets import sample_requests

    return sample_requests(
        args.dataset_name,
        args.num_prompts,
        tokenizer=tokenizer,
        seed=args.seed,
        path=args.dataset_path,
        input_len=args.input_len,
        output_len=args.output_len,
        range_ratio=args.range_ratio,
        prefix_len=args.prefix_len,
        num_prefixes=args.num_prefixes,
        num_images=args.random_mm_base_items_per_request,
        image_size=args.random_mm_image_size,
    )


def _ignores_eos(args: argparse.Namespace) -> bool:
    if args.ignore_eos is not None:
        return bool(args.ignore_eos)
    return args.dataset_name in ("random", "random-mm", "prefix_repetition")


def _params(ignore_eos: bool) -> SamplingParams:
    from mvllm.extension_api import SamplingParams

    return SamplingParams(ignore_eos=ignore_eos, detokenize=True)


def _target(args: argparse.Namespace) -> ServerEndpoint:
    from mvllm_bench.client import ENDPOINTS, ServerEndpoint

    sampling = {name: value for name in SAMPLING_OPTIONS if (value := getattr(args, name)) is not None}
    return ServerEndpoint(
        base_url=args.base_url or f"http://{args.host}:{args.port}",
        endpoint=args.endpoint or ENDPOINTS[args.endpoint_type],
        model=getattr(args, "model", ""),
        chat=args.endpoint_type == "openai-chat",
        ignore_eos=_ignores_eos(args),
        extra_body={**sampling, **args.extra_body},
        headers=authorization_headers(args.api_key) | _pairs("--header", args.header),
        timeout=args.timeout,
        verify=not args.insecure,
    )


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in METRICS]:
        raise ConfigError(f"--percentile-metrics: {unknown[0]!r} is not one of {', '.join(METRICS)}.")
    return names


def _percentiles(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = [-1.0]
    if not all(0 <= percentile <= 100 for percentile in found):
        raise ConfigError(f"--metric-percentiles is {text!r}; it must be numbers from 0 to 100, such as 50,90,99.")
    return found


def _limits(given: list[str]) -> dict[str, float]:
    limits = {}
    for text in given:
        name, _, value = text.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if name not in GOODPUT_METRICS or not limit >= 0:
            raise ConfigError(
                f"--goodput: {text!r} is not METRIC:MILLISECONDS, such as ttft:200, with one of "
                f"{', '.join(GOODPUT_METRICS)}."
            )
        limits[name] = limit
    return limits


def _pairs(option: str, given: list[str]) -> dict[str, str]:
    pairs = dict(text.partition("=")[::2] for text in given)
    if bad := [text for text in given if "=" not in text]:
        raise ConfigError(f"{option}: {bad[0]!r} must be NAME=VALUE.")
    return pairs


def _print_errors(errors: list[str]) -> None:
    """Prints the most frequent errors with their counts."""
    from collections import Counter

    for error, count in Counter(errors).most_common(5):
        print(f"error, {count} times: {error}", file=sys.stderr)
    if any(error.startswith("HTTP status 429") for error in errors):
        print("The server's queue was full. Limit concurrent requests with --max-concurrency.", file=sys.stderr)


def _report(
    args: argparse.Namespace,
    title: str,
    rows: list[tuple[str, object]],
    result: dict[str, Any],
    platform: str | None = None,
) -> int:
    """Prints the result as a table, and writes it to the file of `--output-json`; returns the exit status."""
    from mvllm_bench.report import format_table, write_json

    print(format_table(title, rows))
    if platform is not None:
        print(f"Platform {platform}.")
    if args.output_json is not None:
        write_json(args.output_json, result)
    return 0


def _write_serving_result(args: argparse.Namespace, settings: dict[str, Any], result: dict[str, Any]) -> None:
    """Writes the settings and the result of `mvllm bench serve` to the result file."""
    from mvllm_bench.report import write_json

    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    rate = args.request_rate if math.isfinite(args.request_rate) else "inf"
    head = {
        "date": now,
        "endpoint_type": args.endpoint_type,
        "backend": args.endpoint_type,
        "label": args.label,
    }
    concurrency = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    model = settings["model_id"].rstrip("/").rpartition("/")[2]
    default = f"{args.label or args.endpoint_type}-{rate}qps{concurrency}-{model}-{now}.json"
    path = args.result_dir / (args.result_filename or default)
    write_json(path, {**head, **settings, "request_rate": rate, **result}, append=args.append_result)
    print(f"Result written to {path}.")


def _progress_bar(args: argparse.Namespace, total: int) -> Any:
    from mvllm.extension_api.cli import show_progress

    return show_progress(total, "Benchmark", disable=args.disable_tqdm)
