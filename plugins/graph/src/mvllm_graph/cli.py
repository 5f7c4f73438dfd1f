"""`mvllm graph`, or `mvllm ops --graph`: lists the operations of models as graphs, and what a compiler lacks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mvllm.extension_api import ConfigError, MvllmError
from mvllm.extension_api.cli import EngineArgs, positive_int
from mvllm.extension_api.contract import Phase
from mvllm.extension_api.platforms import choose_platform, enter_phase

if TYPE_CHECKING:
    from mvllm.plugin_api import GraphCompiler
    from mvllm_graph.operations import GraphOperation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command, which are those of `mvllm ops --graph`."""
    parser.add_argument("operations", metavar="OPERATION", nargs="*", help="List these operations only. Default: all.")
    parser.add_argument(
        "--platform", metavar="NAME", help="Show which operations the compiler of this platform translates."
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        action="append",
        default=[],
        help="With --platform: list the operations of this model's graphs, and what its compiler lacks. A folder with "
        "a config.json is enough. May be repeated.",
    )
    parser.add_argument(
        "--max-model-len",
        metavar="N",
        type=positive_int,
        help="With --model: the longest sequence, in tokens. Default: the model's context length.",
    )


def run(args: argparse.Namespace) -> int:
    """Prints each operation of models as graphs; with a platform, whether its compiler translates it."""
    from mvllm_graph.operations import GRAPH_OPERATIONS

    if unknown := [name for name in args.operations if name not in GRAPH_OPERATIONS]:
        raise ConfigError(f"Unknown operation {unknown[0]!r}. Operations: {', '.join(GRAPH_OPERATIONS)}.")
    if args.max_model_len and not args.model:
        raise ConfigError("--max-model-len is the length of a model's sequences: give --model as well.")
    if args.model and args.platform is None:
        raise ConfigError("--model tells what the compiler of a platform lacks: give --platform as well.")
    known: set[str] | None = None
    if args.platform is not None:
        chosen = choose_platform(args.platform)
        with enter_phase(Phase.WORKER):
            compiler = chosen.platform.graph_compiler()
        if compiler is None:
            raise ConfigError(
                f"The platform {args.platform!r} has no graph compiler: its models run as torch operations, which "
                "`mvllm ops` lists. Name another platform."
            )
        known = set(compiler.operations())
        if args.model:
            return _check_models(args.model, compiler, chosen.platform.capabilities.dtypes[0], args.max_model_len)
    rows = [op for name, op in GRAPH_OPERATIONS.items() if not args.operations or name in args.operations]
    if args.operations:
        print("\n\n".join(_definition(op) for op in rows))
        return 0
    width = max(len(op.name) for op in rows)
    for op in rows:
        translated = "" if known is None else f"{'yes' if op.name in known else if_left_out(op):<8}  "
        print(f"{translated}{op.name:<{width}}  {op.group:<9}  {op.summary}")
    if known is not None:
        print(f"\n{sum(op.name in known for op in rows)} of {len(rows)} operations are translated. The others:")
        print("traced   The operation is traced as the array operations of its definition.")
        print("refused  Models with the operation cannot run.")
        print("unused   Core does not use the operation; it cuts graphs at collectives.")
    return 0


def _check_models(paths: Sequence[str], compiler: GraphCompiler, dtype: str, max_model_len: int | None) -> int:
    """Prints the operations of each model in a dtype, and what the compiler lacks; 1 if it lacks something."""
    from mvllm_graph.worker.model_operations import operations_of_model

    known, failed = set(compiler.operations()), False
    for path in paths:
        print(f"{path}:")
        try:
            args = EngineArgs(model=path, skip_tokenizer_init=True, dtype=dtype, max_model_len=max_model_len)
            config = args.create_engine_config().model
            with enter_phase(Phase.WORKER):
                found = operations_of_model(config, compiler)
        except MvllmError as e:
            failed = True
            print(f"  {e}")
            continue
        width = max(map(len, found.counts))
        for op, count in sorted(found.counts.items()):
            print(f"  {'yes' if op in known else 'no ':<5}{op:<{width}}  {count} nodes")
        for reason in found.reasons:
            print(f"  {reason}")
        print(f"  {'The compiler cannot run it.' if found.reasons else 'The compiler can run it.'}")
        failed = failed or bool(found.reasons)
    return int(failed)


def if_left_out(op: GraphOperation) -> str:
    """What core does with an operation that a compiler does not name: `traced`, `refused` or `unused`."""
    return op.if_left_out or ("refused" if op.group in ("attention", "array") else "unused")


def _definition(op: GraphOperation) -> str:
    """The definition of an operation; for one with a state also its form in graphs."""
    lines = [f"{op.name} ({op.group})", "", op.definition]
    if op.updates and op.reference is not None:
        from mvllm_graph.arguments import array_parameters

        arrays = array_parameters(op.reference)
        others = [name for name in op.parameters if name not in arrays and name != "max_query_len"]
        lines += [
            "",
            "In a graph:",
            f"    inputs: {', '.join(arrays)}; absent ones are None",
            f"    attributes: {', '.join(others) or 'none'}",
            f"    updated: {', '.join(op.updates)}, an input of kind `state`, which the program keeps: "
            "[num_slots + 1, ...]",
            "    max_query_len: no attribute, but `StepSizes.max_query_len` of the run",
        ]
    return "\n".join(lines)
