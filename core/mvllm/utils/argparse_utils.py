"""Public name of the argument parser for scripts."""

from mvllm.entrypoints.cli.flexible_argument_parser import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
