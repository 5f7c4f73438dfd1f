"""Requests that an AsyncLLM accepts at once."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mvllm.config.engine_args import EngineArgs
from mvllm.config.engine_settings import SERVER_MAX_QUEUED_REQUESTS
from mvllm.engine.frontend.admission import AdmissionControl
from mvllm.engine.metrics.stats import EngineMetrics
from mvllm.errors import QueueFullError


@pytest.mark.parametrize("number", [2_000, 20_000])
def test_a_program_may_add_any_number_of_prompts_and_a_server_has_a_limit(number: int) -> None:
    config = EngineArgs.from_kwargs(model="demo", max_num_seqs=256).create_engine_config()
    queued = SimpleNamespace(num_sequences=1, num_prompt_tokens=10)
    parts = (cast(Any, queued), cast(Any, SimpleNamespace(num_other_sequences=0)), EngineMetrics(1024))
    AdmissionControl(config, *parts).check_capacity(number, 100 * number)
    limits = dataclasses.replace(config.scheduler, max_queued_requests=SERVER_MAX_QUEUED_REQUESTS)
    with pytest.raises(QueueFullError, match="max_queued_requests"):
        AdmissionControl(dataclasses.replace(config, scheduler=limits), *parts).check_capacity(number, 100 * number)
