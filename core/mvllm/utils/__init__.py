"""Helpers of scripts: `FlexibleArgumentParser`."""

from mvllm.utils.argparse_utils import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
