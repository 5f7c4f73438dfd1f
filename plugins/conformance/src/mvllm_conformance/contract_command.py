"""`mvllm contract`: prints the platform contract, or its changes since a saved version."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mvllm.extension_api import ConfigError
from mvllm.extension_api.cli import missing_part
from mvllm_conformance.contract_changes import changes, needed_version
from mvllm_conformance.contract_surface import Surface, as_data, as_text, from_data, read_surface


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--json", action="store_true", help="Print JSON, which --against can read.")
    parser.add_argument(
        "--against",
        metavar="FILE",
        help="Print the changes since the contract in this file, which an earlier --json wrote; exit status 1 if "
        "plugins for that version may need changes.",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the contract or its changes."""
    surface = read_surface()
    if args.against is not None:
        old = _read(args.against)
        if old.graph_operations and not surface.graph_operations:
            what = f"--against {args.against}, which has the operations of graphs,"
            raise ConfigError(missing_part("graph", what) or f"{what} needs the package mvllm-graph.")
        return _compare(old, surface, as_json=args.json)
    print(json.dumps(as_data(surface), indent=1) if args.json else as_text(surface))
    return 0


def _compare(old: Surface, new: Surface, *, as_json: bool) -> int:
    found = changes(old, new)
    compatible = needed_version(old.contract, found)[0] == old.contract[0]
    if as_json:
        listed = [{"step": change.step, "text": change.text} for change in found]
        print(json.dumps({"compatible": compatible, "changes": listed}, indent=1))
    else:
        print("\n".join(map(str, found)) if found else "nothing changed")
    return 0 if compatible else 1


def _read(path: str) -> Surface:
    try:
        return from_data(json.loads(Path(path).read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ConfigError(
            f"--against {path} cannot be read as a contract ({type(e).__name__}: {e}); give a file that "
            "`mvllm contract --json` wrote."
        ) from e
