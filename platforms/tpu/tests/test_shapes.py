"""The number of programs that the warm-up compiles."""

from __future__ import annotations

from mvllm.config.engine_config import SchedulerConfig
from mvllm.sampling.batch_plan import warm_up_params
from mvllm.worker.warm_up import sample_sizes, step_shapes
from mvllm_tpu.shapes import policy

VOCAB_SIZE, MAX_MODEL_LEN, BLOCK_SIZE = 128_256, 131_072, 16  # of Llama 3.1 8B, and the preferred block size
MOST_PROGRAMS = 40


def num_programs(max_model_len: int, max_tokens: int, max_rows: int) -> int:
    """Programs of the model, and those of sampling."""
    limits = {"max_tokens": max_tokens, "max_rows": max_rows}
    steps = step_shapes(policy(), **limits, max_pages=max_model_len // BLOCK_SIZE, block_size=BLOCK_SIZE)
    return len(list(steps)) + len(sample_sizes(policy(), max_rows)) * len(warm_up_params(VOCAB_SIZE))


def test_the_warm_up_of_an_8b_model_with_default_settings_compiles_few_programs():
    defaults = SchedulerConfig()
    budget, rows = defaults.max_num_batched_tokens, defaults.max_num_seqs
    assert (budget, rows) == (2048, 256), "the defaults of the command line, too"
    assert 20 < num_programs(MAX_MODEL_LEN, budget, rows) <= MOST_PROGRAMS
    assert num_programs(8192, budget, rows) < num_programs(MAX_MODEL_LEN, budget, rows)


def test_single_streams_and_full_batches_have_steps_without_padding_tokens():
    for rows in (16, 256):
        shapes = list(step_shapes(policy(), max_tokens=2048, max_rows=256, max_pages=512, block_size=16))
        assert any(shape.tokens == shape.requests == rows for shape in shapes)
