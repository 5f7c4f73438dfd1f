"""`mvllm bench`: benchmarks of an engine (throughput, latency, startup) and of a running server."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mvllm.entrypoints.bench.datasets import DATASETS, DEFAULT_INPUT_LEN, DEFAULT_OUTPUT_LEN, DEFAULT_PREFIX_LEN
from mvllm.entrypoints.bench.metrics import GOODPUT_METRICS, METRICS
from mvllm.entrypoints.cli.argument_parser import ModelAction, add_positional_model
from mvllm.entrypoints.cli.arguments import add_engine_arguments, engine_args, json_object
from mvllm.entrypoints.cli.config_file import add_config_argument
from mvllm.entrypoints.openai_client import API_KEY_VARIABLE, authorization_headers
from mvllm.errors import ConfigError, MvllmError

if TYPE_CHECKING:
    from mvllm.entrypoints.bench.client import ServerEndpoint
    from mvllm.entrypoints.bench.datasets import BenchmarkTokenizer, SampleRequest
    from mvllm.messages.sampling_params import SamplingParams

_KINDS = ("openai", "openai-chat")  # of endpoints
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


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


# --- options


def _add_throughput(parser: argparse.ArgumentParser) -> None:
    _add_dataset(parser)
    _add_output(parser)
    add_engine_arguments(parser, own_seed=True)


def _add_latency(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batch")
    group.add_argument("--input-len", type=int, default=32, metavar="N", help="Tokens of each prompt. Default: 32.")
    group.add_argument("--output-len", type=int, default=128, metavar="N", help="Tokens to generate. Default: 128.")
    group.add_argument("--batch-size", type=int, default=8, metavar="N", help="Prompts at once. Default: 8.")
    group.add_argument(
        "--num-iters-warmup", type=int, default=3, metavar="N", help="Batches that are not measured. Default: 3."
    )
    group.add_argument("--num-iters", type=int, default=10, metavar="N", help="Measured batches. Default: 10.")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="Seed of the prompts. Default: 0.")
    _add_output(parser)
    add_engine_arguments(parser, own_seed=True)


def _add_startup(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-iters", type=int, default=3, metavar="N", help="Measured starts. Default: 3.")
    parser.add_argument(
        "--num-iters-warmup",
        type=int,
        default=1,
        metavar="N",
        help="Starts that are not measured; they load files into the page cache. Default: 1.",
    )
    _add_output(parser)
    add_engine_arguments(parser)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument(
        "--base-url", metavar="URL", help="URL of the server. Default: http://HOST:PORT from the two options below."
    )
    server.add_argument("--host", default="127.0.0.1", metavar="HOST", help="Default: 127.0.0.1.")
    server.add_argument("--port", type=int, default=8000, metavar="N", help="Default: 8000.")
    server.add_argument(
        "--endpoint-type",
        "--backend",
        choices=_KINDS,
        default=_KINDS[0],
        help="Completions (openai) or chat completions (openai-chat). Default: openai.",
    )
    server.add_argument(
        "--endpoint",
        metavar="PATH",
        help="Path of the endpoint. Default: /v1/completions or /v1/chat/completions, by the type.",
    )
    text = "Name on the server. Default: the first that it lists."
    server.add_argument("--model", action=ModelAction, default=argparse.SUPPRESS, metavar="NAME", help=text)
    add_positional_model(parser)
    server.add_argument(
        "--tokenizer",
        metavar="TEXT",
        help="Model folder, hub name or 'demo' whose tokenizer makes prompts and counts tokens; 'none' for no "
        "tokenizer. Default: the model's.",
    )
    server.add_argument(
        "--api-key", metavar="KEY", help=f"Sent as bearer token. Default, and safer: the variable {API_KEY_VARIABLE}."
    )
    server.add_argument(
        "--header", action="append", default=[], metavar="NAME=VALUE", help="May be given several times."
    )
    server.add_argument("--insecure", action="store_true", help="Do not check the server's certificate.")
    server.add_argument(
        "--timeout", type=float, default=6 * 3600.0, metavar="S", help="Timeout of a request in seconds. Default: 6 h."
    )
    server.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=60.0,
        metavar="S",
        help="Seconds to wait for the response to a first request, which is not measured; 0 sends none. Default: 60.",
    )

    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate", type=float, default=math.inf, metavar="X", help="Requests per second. Default: all at once."
    )
    load.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="Burstiness of arrivals: 1 is a Poisson process, less gives bursts, more gives even gaps. Default: 1.",
    )
    load.add_argument(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="Limit of concurrent requests. Default: 1024 if all are sent at once, which a server with default "
        "settings queues; no limit with a --request-rate.",
    )
    load.add_argument(
        "--num-warmups", type=int, default=0, metavar="N", help="Requests that are not measured. Default: 0."
    )
    _add_dataset(parser)

    sampling = parser.add_argument_group("sampling", "Defaults are the server's.")
    for name in _SAMPLING:
        kind = int if name == "top_k" else float
        sampling.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N" if kind is int else "X")
    sampling.add_argument(
        "--extra-body", type=json_object, default={}, metavar="JSON", help="Additional fields of every request."
    )

    result = parser.add_argument_group("result")
    result.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl,e2el",
        metavar="LIST",
        help=f"Metrics to report, of {', '.join(METRICS)}. Default: all.",
    )
    result.add_argument(
        "--metric-percentiles",
        default="99",
        metavar="LIST",
        help="Percentiles to report, such as 50,90,99. Default: 99.",
    )
    result.add_argument(
        "--goodput",
        nargs="+",
        metavar="METRIC:MS",
        help=f"Count requests within these limits in milliseconds, of {', '.join(GOODPUT_METRICS)}; "
        "such as ttft:200 tpot:50.",
    )
    result.add_argument("--save-result", action="store_true", help="Write the result to a JSON file.")
    result.add_argument("--save-detailed", action="store_true", help="Include the timings and text of each request.")
    result.add_argument("--append-result", action="store_true", help="Append the result to the file.")
    result.add_argument(
        "--result-dir",
        type=Path,
        default=Path(),
        metavar="PATH",
        help="Folder of the result file. Default: the current folder.",
    )
    result.add_argument(
        "--result-filename", metavar="NAME", help="Name of the result file. Default: from load, model and time."
    )
    result.add_argument("--metadata", nargs="+", default=[], metavar="KEY=VALUE", help="Stored in the result.")
    result.add_argument("--label", metavar="TEXT", help="Stored in the result.")
    _add_quiet(result)
    add_config_argument(parser)


def _add_dataset(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--dataset-name",
        choices=DATASETS,
        default=DATASETS[0],
        help="random: random words; sharegpt: a file of conversations; prefix_repetition: random words after one of a "
        "few prefixes; builtin: 16 fixed prompts. Default: random.",
    )
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="File of the dataset sharegpt.")
    group.add_argument("--num-prompts", type=int, default=1000, metavar="N", help="Number of requests. Default: 1000.")
    group.add_argument(
        "--input-len",
        "--random-input-len",
        "--prefix-repetition-suffix-len",
        type=int,
        metavar="N",
        help=f"Tokens of a random prompt without its prefix. Default: {DEFAULT_INPUT_LEN}.",
    )
    group.add_argument(
        "--output-len",
        "--random-output-len",
        "--sharegpt-output-len",
        "--prefix-repetition-output-len",
        type=int,
        metavar="N",
        help=f"Output tokens to request. Default: {DEFAULT_OUTPUT_LEN}, or the length of the answer in the file.",
    )
    group.add_argument(
        "--range-ratio",
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="X",
        help="Draw both lengths uniformly from length * (1 ± X); from 0 to less than 1. Default: 0.",
    )
    group.add_argument(
        "--prefix-len",
        "--random-prefix-len",
        "--prefix-repetition-prefix-len",
        type=int,
        metavar="N",
        help=f"Tokens of the shared prefix. Default: 0, or {DEFAULT_PREFIX_LEN} for prefix_repetition.",
    )
    group.add_argument(
        "--num-prefixes",
        "--prefix-repetition-num-prefixes",
        type=int,
        default=10,
        metavar="N",
        help="Number of prefixes of prefix_repetition. Default: 10.",
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Generate until the output has its full length. Default: for random prompts.",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="Seed of the requests. Default: 0.")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("result")
    group.add_argument("--output-json", type=Path, metavar="FILE", help="Write the result to this file.")
    _add_quiet(group)


def _add_quiet(group: Any) -> None:
    group.add_argument("--disable-tqdm", action="store_true", help="Show no progress.")


# --- benchmarks


def _run_throughput(args: argparse.Namespace) -> int:
    from mvllm.entrypoints.bench.offline import measure_throughput
    from mvllm.entrypoints.bench.report import format_table, write_json
    from mvllm.entrypoints.llm import LLM

    settings = engine_args(args)
    samples = _samples(args, _tokenizer(settings.tokenizer or settings.model))
    with LLM.from_engine_args(settings) as llm, _progress_bar(args, len(samples)) as bar:
        params = _params(_ignores_eos(args))
        result = measure_throughput(llm.llm_engine, samples, params, on_done=lambda num_tokens: bar.update(1))
        where = llm.llm_engine.platform_summary
    rows = [
        ("Requests", result["num_requests"]),
        ("Duration (s)", result["elapsed_time"]),
        ("Input tokens", result["total_input_tokens"]),
        ("Output tokens", result["total_output_tokens"]),
        ("Requests per second", result["requests_per_second"]),
        ("Tokens per second", result["tokens_per_second"]),
        ("Output tokens per second", result["output_tokens_per_second"]),
    ]
    print(format_table("Throughput", rows))
    print(f"Platform {where}.")
    if args.output_json is not None:
        write_json(args.output_json, result)
    return 0


def _run_latency(args: argparse.Namespace) -> int:
    from mvllm.entrypoints.bench.offline import measure_latency
    from mvllm.entrypoints.bench.report import format_table, write_json
    from mvllm.entrypoints.llm import LLM

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
    print(format_table(f"Latency of {args.batch_size} x ({args.input_len} in, {args.output_len} out)", rows))
    print(f"Platform {where}.")
    if args.output_json is not None:
        write_json(args.output_json, result)
    return 0


def _run_startup(args: argparse.Namespace) -> int:
    from mvllm.entrypoints.bench.report import format_table, write_json
    from mvllm.entrypoints.bench.startup import measure_one_startup, measure_startup

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
    print(format_table("Startup", rows))
    if args.output_json is not None:
        write_json(args.output_json, result)
    return 0


def _run_serve(args: argparse.Namespace) -> int:
    import asyncio
    import dataclasses

    from mvllm.entrypoints.bench.client import require_aiohttp
    from mvllm.entrypoints.bench.metrics import calculate_metrics, per_request_details
    from mvllm.entrypoints.bench.report import format_serving_table, write_json
    from mvllm.entrypoints.bench.serving import DEFAULT_MAX_CONCURRENCY, LoadPattern, get_first_model, run_benchmark

    selected = _names(args.percentile_metrics)
    percentiles = _percentiles(args.metric_percentiles)
    goodput = None if args.goodput is None else _limits(args.goodput)
    metadata = _pairs("--metadata", args.metadata)
    require_aiohttp()
    target = _target(args)
    if not target.model:
        target = dataclasses.replace(target, model=asyncio.run(get_first_model(target)))
    name = args.tokenizer or target.model
    tokenizer = None if name == "none" or not _needs_tokenizer(args) else _tokenizer_of_server(name)
    samples = _samples(args, tokenizer)
    max_concurrency = args.max_concurrency
    if max_concurrency is None and math.isinf(args.request_rate) and len(samples) > DEFAULT_MAX_CONCURRENCY:
        max_concurrency = DEFAULT_MAX_CONCURRENCY
        print(f"At most {max_concurrency} requests are sent at a time (--max-concurrency).", file=sys.stderr)
    load = LoadPattern(args.request_rate, args.burstiness, max_concurrency, args.num_warmups, args.seed)
    with _progress_bar(args, len(samples)) as bar:
        outcome = asyncio.run(
            run_benchmark(
                target,
                samples,
                load,
                tokenizer=tokenizer,
                ready_timeout=args.ready_check_timeout_sec,
                on_done=lambda trace: bar.update(),
            )
        )
    result = calculate_metrics(
        outcome.traces, outcome.duration, percentiles=percentiles, selected=selected, goodput=goodput
    )
    print(format_serving_table(result, percentiles, selected))
    _print_errors([trace.error for trace in outcome.traces if trace.error is not None])
    if args.save_result or args.append_result or args.save_detailed or args.result_filename:
        now = datetime.now().strftime("%Y%m%d-%H%M%S")
        rate = args.request_rate if math.isfinite(args.request_rate) else "inf"
        head = {
            "date": now,
            "endpoint_type": args.endpoint_type,
            "backend": args.endpoint_type,
            "label": args.label,
            "model_id": target.model,
            "tokenizer_id": name if tokenizer is not None else None,
            "num_prompts": args.num_prompts,
            **metadata,
            "request_rate": rate,
            "burstiness": args.burstiness,
            "max_concurrency": max_concurrency,
        }
        concurrency = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
        model = target.model.rstrip("/").rpartition("/")[2]
        default = f"{args.label or args.endpoint_type}-{rate}qps{concurrency}-{model}-{now}.json"
        path = args.result_dir / (args.result_filename or default)
        more = per_request_details(outcome.traces) if args.save_detailed else {}
        write_json(path, {**head, **result, **more}, append=args.append_result)
        print(f"Result written to {path}.")
    return 0 if result["completed"] else 1


_Add = Callable[[argparse.ArgumentParser], None]
_Run = Callable[[argparse.Namespace], int]
_BENCHMARKS: dict[str, tuple[str, _Add, _Run]] = {
    "serve": ("measure any OpenAI-compatible server under load", _add_serve, _run_serve),
    "throughput": ("measure the tokens per second of an engine", _add_throughput, _run_throughput),
    "latency": ("measure the latency of a batch", _add_latency, _run_latency),
    "startup": ("measure the startup time of an engine", _add_startup, _run_startup),
}


# --- shared parts


def _needs_tokenizer(args: argparse.Namespace) -> bool:
    """Whether the dataset needs a tokenizer. Servers count tokens, so the built-in prompts need none."""
    return args.dataset_name != "builtin" or args.tokenizer is not None


def _tokenizer(name: str) -> BenchmarkTokenizer:
    from mvllm.entrypoints.bench.datasets import BenchmarkTokenizer

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
    from mvllm.entrypoints.bench.datasets import sample_requests

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
    )


def _ignores_eos(args: argparse.Namespace) -> bool:
    if args.ignore_eos is not None:
        return bool(args.ignore_eos)
    return args.dataset_name in ("random", "prefix_repetition")


def _params(ignore_eos: bool) -> SamplingParams:
    from mvllm.messages.sampling_params import SamplingParams

    return SamplingParams(ignore_eos=ignore_eos, detokenize=True)


def _target(args: argparse.Namespace) -> ServerEndpoint:
    from mvllm.entrypoints.bench.client import ENDPOINTS, ServerEndpoint

    sampling = {name: value for name in _SAMPLING if (value := getattr(args, name)) is not None}
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


def _progress_bar(args: argparse.Namespace, total: int) -> Any:
    from mvllm.progress import show_progress

    return show_progress(total, "Benchmark", disable=args.disable_tqdm)
