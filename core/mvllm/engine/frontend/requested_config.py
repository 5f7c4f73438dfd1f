"""The configuration that engine arguments ask for, checked for a platform before a model is downloaded."""

from __future__ import annotations

from mvllm.config.engine_args import EngineArgs
from mvllm.config.engine_config import EngineConfig
from mvllm.config.hub import may_be_fetched
from mvllm.platform.choose import choose_platform


def requested_config(args: EngineArgs) -> EngineConfig:
    """`args.create_engine_config()`, which fetches the model if it is on the hub.

    A platform that cannot run, for example because the installed torch was built for other devices, is an error before
    the download. Models on this machine are not checked here: the engine does it when it starts.

    Raises:
        PlatformError, ContractError: No platform can run the model.
        ConfigError, ModelError: As `create_engine_config`.
    """
    if args.model is not None and may_be_fetched(args.model):
        choose_platform(args.platform)
    return args.create_engine_config()
