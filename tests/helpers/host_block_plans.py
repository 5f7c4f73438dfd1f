"""Drives the executor of an idle engine with hand-made plans that save blocks to host blocks and load them again.

compute a prompt -> save its blocks -> NaN in all of them -> load into other blocks -> the next token
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mvllm import LLM, SamplingParams
from mvllm.kv_transfer.host_kv_cache import HostKVCache
from mvllm.messages.scheduler_output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from mvllm.platform.worker_protocol import HostBlockNeeds
from tests.helpers.parity import BLOCK_SIZE

NUM_HOST = 24
CLOBBER = NUM_HOST - 1
"""A host block of bytes 0xff: NaN in every float dtype."""


class HostBlockDriver:
    """One engine and its host blocks.

    Args:
        llm: Its engine is idle and computes no other request.

    Attributes:
        executor: Its executor.
        needs: The parts of all ranks.
        blocks, states: The host blocks; None where no rank has a part.
    """

    def __init__(self, llm: LLM) -> None:
        core: Any = llm.llm_engine._client._core  # type: ignore[attr-defined]
        self.executor = core._executor
        self.num_groups = len(core.cache_summary.windows)
        self.needs: list[HostBlockNeeds] = self.executor.collective_rpc("host_block_needs")
        self.blocks = self._host_blocks([needs.block_bytes for needs in self.needs])
        self.states = self._host_blocks([needs.state_bytes for needs in self.needs])
        self._step = 0
        self.map()

    def map(self) -> None:
        """Lets every worker open the host blocks."""
        arguments: list[Any] = []
        for host in (self.blocks, self.states):
            arguments += ["", 0, []] if host is None else [host.path, host.num_blocks, host.rank_bytes]
        self.executor.collective_rpc("map_host_blocks", tuple(arguments))

    def run(self, **fields: Any) -> ModelRunnerOutput:
        """One step with these fields of its plan."""
        output: ModelRunnerOutput = self.executor.execute_model(SchedulerOutput(step=self._step, **fields)).result()
        assert output.step == self._step
        self._step += 1
        return output

    def tables(self, first: int, num_blocks: int) -> list[list[int]]:
        """A block table for each group, of consecutive blocks."""
        return [
            list(range(first + group * num_blocks, first + (group + 1) * num_blocks))
            for group in range(self.num_groups)
        ]

    def compute(
        self,
        tokens: list[int],
        tables: list[list[int]],
        computed: int,
        end: int,
        *,
        states: tuple[int, int],
        **fields: Any,
    ) -> tuple[list[int], Any]:
        """Computes tokens [computed, end) of a prompt in row 0, and frees it; sampled tokens and log-probabilities.

        Args:
            states: The slots that are read and written, in models with sequence states.
            fields: Further fields of the plan.
        """
        request = NewRequestData(
            request_id=f"step {self._step}",
            row=0,
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            num_computed_tokens=computed,
            block_ids=tables[0],
            sampling_params=SamplingParams(temperature=0, logprobs=5, max_tokens=4),
            eos_token_ids=[],
            more_block_ids=tables[1:],
        )
        slots = {"read_slots": [states[0]], "write_slots": [states[1]]} if self.states is not None else {}
        output = self.run(
            new_requests=[request],
            rows=[0],
            num_scheduled_tokens=[end - computed],
            total_num_scheduled_tokens=end - computed,
            **slots,
            **fields,
        )
        self.run(freed_rows=[0])
        return output.sampled_token_ids, output.logprobs

    def clobber(self, blocks: list[int], states: list[int]) -> None:
        """Loads NaN into blocks and states."""
        for host in (self.blocks, self.states):
            if host is not None:
                host.block(CLOBBER)[:] = 0xFF
        for block in blocks if self.blocks is not None else ():
            self.run(loaded_blocks=[block], loaded_host_blocks=[CLOBBER])
        for state in states if self.states is not None else ():
            self.run(loaded_states=[state], loaded_host_states=[CLOBBER])

    def check_round_trip(self, tokens: list[int]) -> None:
        """Blocks and states that were saved, clobbered and loaded elsewhere give the same bits as before."""
        num_blocks = (len(tokens) - 1) // BLOCK_SIZE
        end = num_blocks * BLOCK_SIZE
        old, new = self.tables(1, num_blocks + 1), self.tables(1 + self.num_groups * (num_blocks + 1), num_blocks + 1)
        self.compute(tokens, old, 0, end, states=(-1, 0))
        expected = self.compute(tokens, old, end, len(tokens), states=(0, 1))
        assert expected[0][0] >= 0 and expected[1], "a token was sampled, with log-probabilities"

        # The last block of a table was written by the step that must be repeated.
        saved = [block for table in old for block in table[:-1]]
        loaded = [block for table in new for block in table[:-1]]
        hosts = [(5 * i + 3) % CLOBBER for i in range(len(saved))]
        assert len(set(hosts)) == len(hosts)
        copied: dict[str, Any] = {}
        if self.blocks is not None:
            copied |= {"saved_blocks": saved, "saved_host_blocks": hosts}
        if self.states is not None:
            copied |= {"saved_states": [0], "saved_host_states": [7]}
        self.run(**copied)
        self.clobber([block for table in (*old, *new) for block in table], [0, 1, 2, 3])
        # A save of a block that the same plan loads, or computes, takes the contents before it.
        copied = {}
        if self.blocks is not None:
            copied |= {"loaded_blocks": loaded, "loaded_host_blocks": hosts}
            copied |= {"saved_blocks": [loaded[0], new[0][-1]], "saved_host_blocks": [0, 1]}
        if self.states is not None:
            copied |= {
                "loaded_states": [2],
                "loaded_host_states": [7],
                "saved_states": [2, 3],
                "saved_host_states": [0, 1],
            }
        found = self.compute(tokens, new, end, len(tokens), states=(2, 3), **copied)
        assert found == expected
        for host in (self.blocks, self.states):
            if host is not None:
                assert np.all(host.block(0) == 0xFF) and np.all(host.block(1) == 0xFF)

    def _host_blocks(self, rank_bytes: list[int]) -> HostKVCache | None:
        return HostKVCache(NUM_HOST, rank_bytes) if any(rank_bytes) else None
