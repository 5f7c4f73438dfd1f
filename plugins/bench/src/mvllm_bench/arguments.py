"""Options of `mvllm bench`, by benchmark."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from mvllm.extension_api.cli import (
    ModelAction,
    add_config_argument,
    add_engine_arguments,
    add_positional_model,
    json_object,
)
from mvllm.extension_api.openai_client import API_KEY_VARIABLE
from mvllm_bench.datasets import DATASETS, DEFAULT_INPUT_LEN, DEFAULT_OUTPUT_LEN, DEFAULT_PREFIX_LEN
from mvllm_bench.metrics import GOODPUT_METRICS, METRICS

SAMPLING_OPTIONS = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Sampling parameters that are sent to the server."""

_ENDPOINT_TYPES = ("openai", "openai-chat")


def add_throughput_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `mvllm bench throughput`."""
    _add_dataset(parser)
    _add_output(parser)
    add_engine_arguments(parser, own_seed=True)


def add_latency_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `mvllm bench latency`."""
    group = parser.add_argument_group("batch")
    _add_number(group, "--input-len", help="Tokens of each prompt.", default=32)
    _add_number(group, "--output-len", help="Tokens to generate.", default=128)
    _add_number(group, "--batch-size", help="Prompts at once.", default=8)
    _add_number(group, "--num-iters-warmup", help="Batches that are not measured.", default=3)
    _add_number(group, "--num-iters", help="Measured batches.", default=10)
    _add_number(group, "--seed", help="Seed of the prompts.", default=0)
    _add_output(parser)
    add_engine_arguments(parser, own_seed=True)


def add_startup_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `mvllm bench startup`."""
    _add_number(parser, "--num-iters", help="Measured starts.", default=3)
    _add_number(
        parser,
        "--num-iters-warmup",
        help="Starts that are not measured; they load files into the page cache.",
        default=1,
    )
    _add_output(parser)
    add_engine_arguments(parser)


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `mvllm bench serve`."""
    server = parser.add_argument_group("server")
    server.add_argument(
        "--base-url", metavar="URL", help="URL of the server. Default: http://HOST:PORT from the two options below."
    )
    server.add_argument("--host", default="127.0.0.1", metavar="HOST", help="Default: 127.0.0.1.")
    _add_number(server, "--port", help="Default: 8000.", default=8000, show_default=False)
    server.add_argument(
        "--endpoint-type",
        "--backend",
        choices=_ENDPOINT_TYPES,
        default=_ENDPOINT_TYPES[0],
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
        help="Model folder, GGUF file, hub name or 'demo' whose tokenizer makes prompts and counts tokens; 'none' for "
        "no tokenizer. Default: the model's.",
    )
    server.add_argument(
        "--api-key", metavar="KEY", help=f"Sent as bearer token. Default, and safer: the variable {API_KEY_VARIABLE}."
    )
    server.add_argument(
        "--header", action="append", default=[], metavar="NAME=VALUE", help="May be given several times."
    )
    server.add_argument("--insecure", action="store_true", help="Do not check the server's certificate.")
    _add_number(
        server,
        "--timeout",
        help="Timeout of a request in seconds. Default: 6 h.",
        default=6 * 3600.0,
        type=float,
        metavar="S",
        show_default=False,
    )
    _add_number(
        server,
        "--ready-check-timeout-sec",
        help="Seconds to wait for the response to a first request, which is not measured; 0 sends none.",
        default=60.0,
        type=float,
        metavar="S",
    )

    load = parser.add_argument_group("load")
    _add_number(
        load,
        "--request-rate",
        help="Requests per second. Default: all at once.",
        default=math.inf,
        type=float,
        show_default=False,
    )
    _add_number(
        load,
        "--burstiness",
        help="Burstiness of arrivals: 1 is a Poisson process, less gives bursts, more gives even gaps.",
        default=1.0,
        type=float,
    )
    _add_number(
        load,
        "--max-concurrency",
        help="Limit of concurrent requests. Default: 1024 if all are sent at once, which a server with default "
        "settings queues; no limit with a --request-rate.",
    )
    _add_number(load, "--num-warmups", help="Requests that are not measured.", default=0)
    _add_dataset(parser)

    sampling = parser.add_argument_group("sampling", "Defaults are the server's.")
    for name in SAMPLING_OPTIONS:
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


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `mvllm bench sweep`."""
    group = parser.add_argument_group("sweep")
    group.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help="Values to compare of one setting of the engine, of api_server_count, or of an environment variable (in "
        "capitals); may be given several times, for all combinations. "
        "Default: max_num_seqs and max_num_batched_tokens.",
    )
    group.add_argument(
        "--measure",
        choices=("engine", "server"),
        help="Measure an engine that gets all requests at once, or a server under load. Default: server with --goodput "
        "or an option of the load, else engine.",
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        metavar="METRIC:MS",
        help="Maximize the output tokens per second of requests within these limits in milliseconds, of "
        f"{', '.join(GOODPUT_METRICS)}; such as ttft:500 tpot:50. Default: those of all requests.",
    )
    _add_number(
        group, "--request-rate", help="Server: requests per second. Default: --max-concurrency at a time.", type=float
    )
    _add_number(group, "--max-concurrency", help="Server: limit of concurrent requests. Default: 64.")
    _add_number(
        group,
        "--trial-timeout",
        help="Seconds that the start of one candidate may take, and each of its rounds.",
        default=1800.0,
        type=float,
        metavar="S",
    )
    _add_dataset(parser, num_prompts=200)
    result = parser.add_argument_group("result")
    result.add_argument(
        "--output",
        type=Path,
        default=Path("serve.yaml"),
        metavar="FILE",
        help="Config file to write, for `mvllm serve --config FILE`. Default: serve.yaml.",
    )
    result.add_argument(
        "--journal", type=Path, metavar="FILE", help="File with every measured round. Default: OUTPUT.journal."
    )
    result.add_argument("--resume", action="store_true", help="Continue the sweep of the journal.")
    result.add_argument("--overwrite", action="store_true", help="Replace an existing config file and journal.")
    add_engine_arguments(parser, own_seed=True)


def _add_dataset(parser: argparse.ArgumentParser, num_prompts: int = 1000) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--dataset-name",
        choices=DATASETS,
        default=DATASETS[0],
        help="random: random words; sharegpt: a file of conversations; prefix_repetition: random words after one of a "
        "few prefixes; builtin: 16 fixed prompts; random-mm: random words after random pictures, for bench serve with "
        "openai-chat. Default: random.",
    )
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="File of the dataset sharegpt.")
    _add_number(group, "--num-prompts", help="Number of requests.", default=num_prompts)
    _add_number(
        group,
        "--input-len",
        "--random-input-len",
        "--prefix-repetition-suffix-len",
        help=f"Tokens of a random prompt without its prefix. Default: {DEFAULT_INPUT_LEN}.",
    )
    _add_number(
        group,
        "--output-len",
        "--random-output-len",
        "--sharegpt-output-len",
        "--prefix-repetition-output-len",
        help=f"Output tokens to request. Default: {DEFAULT_OUTPUT_LEN}, or the length of the answer in the file.",
    )
    _add_number(
        group,
        "--range-ratio",
        "--random-range-ratio",
        help="Draw both lengths uniformly from length * (1 ± X); from 0 to less than 1.",
        default=0.0,
        type=float,
    )
    _add_number(
        group,
        "--prefix-len",
        "--random-prefix-len",
        "--prefix-repetition-prefix-len",
        help=f"Tokens of the shared prefix. Default: 0, or {DEFAULT_PREFIX_LEN} for prefix_repetition.",
    )
    _add_number(
        group,
        "--num-prefixes",
        "--prefix-repetition-num-prefixes",
        help="Number of prefixes of prefix_repetition.",
        default=10,
    )
    _add_number(group, "--random-mm-base-items-per-request", help="Pictures of each request of random-mm.", default=1)
    group.add_argument(
        "--random-mm-image-size",
        default="256x256",
        metavar="WIDTHxHEIGHT",
        help="Size of the pictures of random-mm in pixels. Default: 256x256.",
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Generate until the output has its full length. Default: for random prompts.",
    )
    _add_number(group, "--seed", help="Seed of the requests.", default=0)


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("result")
    group.add_argument("--output-json", type=Path, metavar="FILE", help="Write the result to this file.")
    _add_quiet(group)


def _add_quiet(group: Any) -> None:
    group.add_argument("--disable-tqdm", action="store_true", help="Show no progress.")


def _add_number(
    group: Any,
    *flags: str,
    help: str,
    default: float | None = None,
    type: type[int] | type[float] = int,
    metavar: str | None = None,
    show_default: bool = True,
) -> None:
    """Adds an option with a number; its default is appended to the help text."""
    if default is not None and show_default:
        help = f"{help} Default: {default:g}."
    metavar = metavar or ("N" if type is int else "X")
    group.add_argument(*flags, type=type, default=default, metavar=metavar, help=help)
