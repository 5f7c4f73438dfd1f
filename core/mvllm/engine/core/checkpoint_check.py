"""Checks the weight files of the models of an engine before workers start."""

from __future__ import annotations

from mvllm.config.engine_config import EngineConfig
from mvllm.models.checkpoint import check_files
from mvllm.platform.interface import Platform
from mvllm.platform.worker_class import own_worker_class


def check_checkpoints(config: EngineConfig, platform: Platform) -> None:
    """Checks that the weights of the model, and of a draft model, are there and complete.

    A platform's own worker may read other files: with one, nothing is checked.

    Raises:
        ModelError: They are missing, pickled or cut short.
    """
    if config.load.load_format == "dummy" or own_worker_class(platform) is not None:
        return
    check_files(config.model.path)
    if config.speculative is not None and config.speculative.model is not None:
        check_files(config.speculative.model.path)
