"""The configuration that engine arguments ask for, checked for a platform before a model is downloaded."""

from __future__ import annotations

import os

from mvllm.config.engine_args import EngineArgs
from mvllm.config.engine_config import EngineConfig
from mvllm.config.env import unknown_variables
from mvllm.config.hub import may_be_fetched
from mvllm.logging import get_logger
from mvllm.platform.choose import choose_platform
from mvllm.platform.discovery import find_sources

logger = get_logger(__name__)


def requested_config(args: EngineArgs) -> EngineConfig:
    """`args.create_engine_config()`, which fetches the model if it is on the hub.

    A platform that cannot run, for example because the installed torch was built for other devices, is an error before
    the download. Models on this machine are not checked here: the engine does it when it starts. Misspelt environment
    variables are logged.

    Raises:
        PlatformError, ContractError: No platform can run the model.
        ConfigError, ModelError: As `create_engine_config`.
    """
    if args.model is not None and may_be_fetched(args.model):
        choose_platform(args.platform)
    if any(name.startswith("MVLLM_") for name in os.environ):
        for sentence in unknown_variables(source.name for source in find_sources()):
            logger.warning("%s", sentence)
    return args.create_engine_config()
