"""`mvllm ops`: lists the operations of models, their parameters, and their providers on a platform."""

from __future__ import annotations

import argparse
import importlib.util

from mvllm.extension_api import ConfigError
from mvllm.extension_api.cli import missing_part, positive_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("operations", metavar="OPERATION", nargs="*", help="List these operations only. Default: all.")
    parser.add_argument("--platform", metavar="NAME", help="The platform. Default: the only available one.")
    parser.add_argument(
        "--op-providers", metavar="NAMES", help="Installed sets of op providers with precedence, comma-separated."
    )
    parser.add_argument(
        "--graph",
        action="store_true",
        help="List the operations of models as graphs, and with --platform which of them its compiler translates.",
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        action="append",
        default=[],
        help="With --graph and --platform: list the operations of this model's graphs, and what its compiler lacks. A "
        "folder with a config.json is enough. May be repeated.",
    )
    parser.add_argument(
        "--max-model-len",
        metavar="N",
        type=positive_int,
        help="With --model: the longest sequence, in tokens. Default: the model's context length.",
    )


def run(args: argparse.Namespace) -> int:
    """Prints each operation with its parameters, shapes, dtypes and facts, then a table of the providers."""
    if args.graph:
        return _list_graph_operations(args)
    from mvllm.extension_api.testing import OpTable, choose_platform, enter_phase, installed_providers
    from mvllm.plugin_api import Phase
    from mvllm_conformance.contract_operations import operation_lines, read_operations

    if args.model or args.max_model_len:
        raise ConfigError("--model lists the operations of a model's graphs: give --graph and --platform as well.")
    operations = read_operations()
    if unknown := [name for name in args.operations if name not in operations]:
        raise ConfigError(f"Unknown operation {unknown[0]!r}. Operations: {', '.join(operations)}.")
    chosen = choose_platform(args.platform)
    with enter_phase(Phase.WORKER):
        names = [name.strip() for name in (args.op_providers or "").split(",") if name.strip()]
        table = OpTable.resolve(chosen.platform.ops(), installed_providers(names))
    rows = [row for row in table.describe() if not args.operations or row.op in args.operations]
    for row in rows:
        print("\n".join(operation_lines(row.op, operations[row.op])) + "\n")
    print(f"Operations on platform {chosen}.")
    print("Providers are tried in this order; the first that supports a case runs it.\n")
    width = max(len(row.op) for row in rows)
    providers = max(len(", ".join(row.candidates)) for row in rows)
    for row in rows:
        print(f"{row.op:<{width}}  {', '.join(row.candidates):<{providers}}  {row.summary}")
    return 0


def _list_graph_operations(args: argparse.Namespace) -> int:
    """Runs the command `graph`, which has the same arguments.

    Raises:
        ConfigError: Its package is not installed.
    """
    if importlib.util.find_spec("mvllm_graph") is None:
        what = "`mvllm ops --graph`"
        raise ConfigError(missing_part("graph", what) or f"{what} needs the package mvllm-graph.")
    from mvllm_graph.cli import run as list_graph_operations

    return list_graph_operations(args)
