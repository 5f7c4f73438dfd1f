"""`mvllm pull`: fetches a model into the cache of the hub."""

from __future__ import annotations

import argparse
from pathlib import Path

from mvllm.extension_api.cli import DEMO, find_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument(
        "name", metavar="NAME", help="A name on the hub; ':Q4_K_M' after it chooses one of its GGUF files."
    )
    parser.add_argument("--revision", metavar="TEXT", help="Branch, tag or commit; by default the main branch.")
    parser.add_argument(
        "--hf-token", metavar="TEXT", help="Token for the hub; by default HF_TOKEN or the stored login."
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="Fetch the repository's Python files, too.")


def run(args: argparse.Namespace) -> int:
    """Fetches the files that an engine would read, with a progress bar, and prints their folder."""
    if args.name == DEMO or Path(args.name).expanduser().exists():
        print(f"{args.name} is on this machine.")
        return 0
    folder = find_model(
        args.name, revision=args.revision, token=args.hf_token, trust_remote_code=args.trust_remote_code
    )
    print(f"{args.name} is in {folder}.")
    return 0
