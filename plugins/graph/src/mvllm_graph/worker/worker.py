"""The worker of platforms with a graph compiler: core's, with a model runner whose models are programs.

The entry point `graph_compiler` of the group `mvllm.workers` names it, so that it runs every platform that claims this
capability and names no worker class of its own.
"""

from __future__ import annotations

from typing import ClassVar

from mvllm.extension_api import get_logger
from mvllm.extension_api.worker import ModelRunner, Worker
from mvllm_graph.worker.model_runner import GraphModelRunner
from mvllm_graph.worker.useful_kv_bytes import useful_kv_bytes

logger = get_logger(__name__)


class GraphWorker(Worker):
    """Worker for platforms whose models run as graphs. Arguments as for Worker."""

    runner_class: ClassVar[type[ModelRunner]] = GraphModelRunner

    def available_kv_bytes(self) -> int:
        """As Worker.available_kv_bytes.

        A program may allocate all of the host's memory at once, and not page by page as it is used, so it gets no more
        than it can use.
        """
        available = super().available_kv_bytes()
        if not self._platform.capabilities.unified_memory:
            return available
        useful = useful_kv_bytes(self._config, self.kv_cache_needs())
        if useful < available:
            logger.info(
                "The KV cache takes twice what max_num_seqs %d requests of the longest length need, not all of the "
                "host's memory that memory_utilization allows. To give it more, set kv_cache_memory_bytes.",
                self._config.scheduler.max_num_seqs,
            )
        return min(useful, available)
