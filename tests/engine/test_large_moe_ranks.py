"""The newer mixture-of-experts families on several ranks give the tokens of transformers, in batches and in chunks."""

from __future__ import annotations

import pytest

from tests.helpers import parity
from tests.helpers.model_zoo import ZOO
from tests.helpers.thread_executor import ThreadExecutor
from tests.helpers.zoo_large_moe import LARGE_MOE

WHICH = (2, 8, 11)
THREADS = f"{ThreadExecutor.__module__}.{ThreadExecutor.__qualname__}"


@pytest.mark.exhaustive
@pytest.mark.shows("layout")
@pytest.mark.parametrize("name", [name for name in LARGE_MOE if not ZOO[name].exhaustive])
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_give_the_tokens_of_transformers(name: str, tensor: int, pipeline: int) -> None:
    expected = parity.oracle(name, WHICH)
    settings = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "max_num_batched_tokens": 32}
    with parity.engine(expected.folder, distributed_executor_backend=THREADS, **settings) as llm:
        parity.check(expected, parity.generate(llm, expected.prompts))
        parity.check(expected, parity.generate(llm, expected.prompts))
