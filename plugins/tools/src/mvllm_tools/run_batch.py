"""`mvllm run-batch`: processes a file of requests in the OpenAI batch format."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import IO, Any, get_args

from mvllm.extension_api import ConfigError
from mvllm.extension_api.cli import (
    UnknownFieldsPolicy,
    add_chat_template_argument,
    add_engine_arguments,
    add_parser_arguments,
    engine_args,
    load_chat_template,
    show_progress,
)

STANDARD_STREAM = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="Requests, one JSON object per line; - reads stdin."
    )
    parser.add_argument(
        "-o", "--output-file", required=True, metavar="FILE", help="Responses, one per line; - writes to stdout."
    )
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="Names of the model in requests. Default: --model as given.",
    )
    parser.add_argument(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="Maximum number of concurrent requests. Default: twice --max-num-seqs.",
    )
    parser.add_argument(
        "--unknown-fields",
        choices=get_args(UnknownFieldsPolicy),
        default="warn",
        help="Unknown fields of a request, such as misspelt ones: warn in the log, refuse the request, "
        "or ignore them. Default: warn.",
    )
    parser.add_argument("--disable-tqdm", action="store_true", help="Show no progress.")
    chat = parser.add_argument_group("chat")
    add_chat_template_argument(chat)
    add_parser_arguments(chat)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Processes every line; returns 1 if all requests failed, else 0."""
    import asyncio

    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency is {args.max_concurrency}; it must be at least 1.")
    template = load_chat_template(args.chat_template)
    source_path, target_path = Path(args.input_file), Path(args.output_file)
    if source_path.exists() and target_path.exists() and source_path.samefile(target_path):
        raise ConfigError(f"The input file {source_path} is also the output file. Give another output file.")
    with contextlib.ExitStack() as stack:
        source = _open(stack, args.input_file, "rb")
        target = _open(stack, args.output_file, "wb")
        counts = asyncio.run(_process_batch(args, template, source, target))
    print(f"{counts.total} requests, {counts.failed} failed.", file=sys.stderr)
    return 1 if counts.failed and counts.failed == counts.total else 0


async def _process_batch(args: argparse.Namespace, template: str | None, source: IO[bytes], target: IO[bytes]) -> Any:
    import asyncio

    from mvllm.extension_api.engine import AsyncLLM
    from mvllm.extension_api.http import ChatTemplateRenderer, OpenAIServingModels, ServingContext, UnknownFields
    from mvllm_tools.batch_runner import BatchRunner

    settings = engine_args(args)
    engine = await asyncio.to_thread(AsyncLLM.from_engine_args, settings)
    with contextlib.ExitStack() as stack:
        stack.callback(engine.shutdown)
        templates = ChatTemplateRenderer()
        stack.callback(templates.close)
        context = ServingContext.create(
            engine,
            templates,
            tool_call_parser=args.tool_call_parser,
            reasoning_parser=args.reasoning_parser,
            chat_template=template,
        )
        stack.callback(context.close)
        bar = stack.enter_context(show_progress(None, "Requests", disable=args.disable_tqdm))
        runner = BatchRunner(
            context,
            OpenAIServingModels(args.served_model_name or (settings.model,), settings.model),
            max_concurrency=args.max_concurrency or 2 * engine.config.scheduler.max_num_seqs,
            on_done=lambda: bar.update(1),
            unknown_fields=UnknownFields(args.unknown_fields),
        )
        return await runner.run(source, target)


def _open(stack: contextlib.ExitStack, name: str, mode: str) -> IO[bytes]:
    if name == STANDARD_STREAM:
        stream: IO[bytes] = sys.stdin.buffer if mode == "rb" else sys.stdout.buffer
        return stream
    try:
        return stack.enter_context(open(name, mode))
    except OSError as e:
        what = "input" if mode == "rb" else "output"
        raise ConfigError(f"The {what} file {name} cannot be opened: {e.strerror}.") from e
