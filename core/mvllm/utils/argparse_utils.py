"""FlexibleArgumentParser: an argument parser for scripts with engine settings.

`--max_model_len` and `--max-model-len` are the same option (see `option_spellings`), and `--config FILE` reads options
from a YAML file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mvllm.entrypoints.cli.argument_parser import CommandLineParser
from mvllm.entrypoints.cli.config_file import FLAG, add_config_argument, expand_config
from mvllm.entrypoints.cli.option_spellings import as_declared
from mvllm.errors import ConfigError

__all__ = ["FlexibleArgumentParser"]


class FlexibleArgumentParser(CommandLineParser):
    """An ArgumentParser that takes underscores for dashes in the names of options, and options from a YAML file.

    Options on the command line override those of the file. The namespace does not contain `config`, unless the script
    has declared an option `--config` itself.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As ArgumentParser. Exits with status 2 if the file of `--config` is not usable."""
        arguments = list(sys.argv[1:] if args is None else args)
        is_own = FLAG not in self._option_string_actions or getattr(self, "_reads_config", False)
        if is_own:
            if not getattr(self, "_reads_config", False):
                add_config_argument(self)
                self._reads_config = True
        try:
            arguments = as_declared(self, arguments)
            if is_own:
                arguments = expand_config(self, arguments)
        except ConfigError as e:
            self.error(str(e))
        self.arguments = arguments
        found, rest = super().parse_known_args(arguments, namespace)
        if is_own and hasattr(found, "config"):
            del found.config
        return found, rest
