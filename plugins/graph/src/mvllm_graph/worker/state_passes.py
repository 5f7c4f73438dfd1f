"""The passes of a step with draft tokens, for models with sequence states.

A graph is traced for steps that leave one state per request, so a step that leaves a state behind each draft token runs
the graph once for each pass (`StepInputs.state_passes`): over the known tokens, then over each draft token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from mvllm.extension_api.worker import StepInputs
from mvllm.plugin_api import DeviceArray, StepSizes

_OF_REQUESTS = ("query_start_loc", "seq_lens", "block_table.0", "read_slots", "write_slots")
_OF_STEPS = ("item_embeds",)


def passes_of(
    inputs: StepInputs, given: Mapping[str, DeviceArray], sizes: StepSizes
) -> Iterator[tuple[dict[str, DeviceArray], StepSizes]]:
    """The inputs and sizes of each pass.

    Args:
        inputs: A step with several passes.
        given, sizes: Inputs and sizes of the whole step.
    """
    passes, drafts, first = inputs.state_passes, inputs.draft_slots, inputs.state_layout
    assert passes is not None and drafts is not None and first is not None, "the step has several passes"
    order, begin = passes.order.numpy(), 0
    counts = np.zeros(sizes.requests, dtype=np.int32)
    counts[: len(drafts.counts)] = drafts.counts
    table, seq_lens = inputs.layout.block_table, inputs.layout.seq_lens
    for number, layout in enumerate((first, *passes.drafts)):
        rows = np.arange(sizes.requests) if not number else (counts >= number).nonzero()[0]
        tokens = order[begin : begin + layout.num_tokens]
        begin += layout.num_tokens
        own = {name: array[tokens] for name, array in given.items() if name not in (*_OF_REQUESTS, *_OF_STEPS)}
        own |= {name: given[name] for name in _OF_STEPS if name in given}
        own |= {"query_start_loc": layout.query_start_loc}
        own |= {"read_slots": layout.read_slots, "write_slots": layout.write_slots}
        if "slot_mapping.0" in own:
            padding = np.arange(layout.num_tokens) >= layout.query_start_loc[-1]
            own["slot_mapping.0"] = np.where(padding, -1, own["slot_mapping.0"]).astype(np.int32)
        lens = np.zeros(layout.num_requests, dtype=np.int32)
        lens[: len(rows)] = seq_lens[rows] - counts[rows] + number
        blocks = np.zeros((layout.num_requests, table.shape[1]), dtype=np.int32)
        blocks[: len(rows)] = table[rows]
        if "seq_lens" in given:
            own |= {"seq_lens": lens, "block_table.0": blocks}
        yield (
            own,
            replace(
                sizes,
                tokens=layout.num_tokens,
                requests=layout.num_requests,
                max_query_len=layout.max_query_len,
                max_seq_len=int(lens.max()),
                num_decodes=layout.num_decodes,
                kind=layout.kind,
            ),
        )
