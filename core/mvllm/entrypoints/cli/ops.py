"""`mvllm ops`: the operations that models are made of, and what implements them on a platform."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--platform", metavar="NAME", help="The platform. Default: the only available one.")
    parser.add_argument("--op-providers", metavar="NAMES", help="Installed sets to ask first, comma-separated.")


def run(args: argparse.Namespace) -> int:
    """Prints a line per operation, with the providers in the order in which they are asked."""
    from mvllm.ops.installed import installed_providers
    from mvllm.ops.registry import OpTable
    from mvllm.platform.choose import choose_platform
    from mvllm.platform.phases import Phase, enter_phase

    chosen = choose_platform(args.platform)
    with enter_phase(Phase.WORKER):
        names = [name.strip() for name in (args.op_providers or "").split(",") if name.strip()]
        table = OpTable.resolve(chosen.platform.ops(), installed_providers(names))
    rows = table.describe()
    print(f"Operations on platform {chosen}.")
    print("Providers are asked in this order; the first that supports a case runs it.\n")
    width = max(len(row.op) for row in rows)
    providers = max(len(", ".join(row.candidates)) for row in rows)
    for row in rows:
        print(f"{row.op:<{width}}  {', '.join(row.candidates):<{providers}}  {row.summary}")
    return 0
