"""Whether an engine uses the draft tokens of a checkpoint's own module, for which the user has not asked.

the checkpoint has the module     mvllm.config.mtp.default_speculative_config
the platform gains                Capabilities.drafts_by_default
nothing excludes the method       what is an error where the user asks for it, is a line in the log here
"""

from __future__ import annotations

from mvllm.config.engine_config import EngineConfig, replace_field
from mvllm.engine.core.capability_checks import check_speculative
from mvllm.errors import ConfigError
from mvllm.logging import get_logger
from mvllm.platform.capabilities import Capabilities

logger = get_logger(__name__)


def settle_default_drafts(config: EngineConfig, capabilities: Capabilities, platform: str) -> EngineConfig:
    """The configuration without speculative decoding if that is the default and something excludes it; logs which.

    Args:
        platform: The platform's name.
    """
    speculative = config.speculative
    if speculative is None or not speculative.is_default:
        return config
    why = _why_not(config, capabilities, platform)
    if why is not None:
        logger.info("No draft tokens of the checkpoint's multi-token-prediction module: %s", why)
        return replace_field(config, "speculative", None)
    logger.info(
        "Steps have up to %d draft tokens of the checkpoint's multi-token-prediction module for each request, while "
        'that gives more tokens per second. speculative_config={"method": "none"} leaves the module out.',
        speculative.num_speculative_tokens,
    )
    return config


def _why_not(config: EngineConfig, capabilities: Capabilities, platform: str) -> str | None:
    if not capabilities.drafts_by_default:
        return (
            f"on the platform {platform!r} they are used where they are asked for "
            '(speculative_config={"method": "mtp"}).'
        )
    if config.parallel.distributed_executor_backend == "external_launcher":
        return "with external_launcher their number cannot follow what they gain."
    try:
        check_speculative(config, capabilities, platform)
    except ConfigError as error:
        return str(error)
    return None
