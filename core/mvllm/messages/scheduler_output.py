"""The plan of one step, which the scheduler sends to the workers, and the result that they return.

The scheduler gives every running request a *row*, a small integer that stays the same while the request runs. Workers
keep the state of each row (token ids, block table, sampling state), so a step needs full data only for rows that start,
and a few integers for all others. A worker appends the tokens it samples to its own rows. Thus the scheduler can plan a
step before it has received the tokens of the previous one (asynchronous scheduling).

    rows                  [3, 0, 7]      batch order
    num_scheduled_tokens  [1, 1, 128]    how far each row advances
    new_block_rows        [7, 7, 0]      row 7 gets two blocks, row 0 one
    new_block_ids         [40, 41, 12]
"""

from __future__ import annotations

import msgspec

from mvllm.messages.lora import LoRARequest
from mvllm.messages.multimodal import EncoderInput, ItemSpan
from mvllm.messages.pooling_params import PoolingParams
from mvllm.messages.requests import PositionLogprobs
from mvllm.messages.sampling_params import SamplingParams

PLACEHOLDER = -1
"""Stands in a plan for a draft token that only the workers know."""
BEHIND_ACCEPTED = -2
"""In `read_slots`."""


class NewRequestData(msgspec.Struct, array_like=True):
    """A request that starts in this step, or starts again after a preemption.

    Attributes:
        request_id: For logs and errors only; the row identifies the request.
        row: The row it occupies from this step on.
        token_ids: All known tokens: the prompt, then what was generated before a preemption.
        num_prompt_tokens: How many of `token_ids` are the prompt.
        num_computed_tokens: How many leading tokens have their KV in the given blocks already.
        block_ids: Its block table as of this step, including the blocks for the tokens scheduled in it.
        sampling_params: How to sample.
        eos_token_ids: Masked until `min_tokens` are generated.
        pooling_params: Set for a pooling request, which samples no tokens.
        more_block_ids: Its block tables in the KV cache groups after the first; `block_ids` is the table of the first.
            Entries of blocks that have left a group's sliding window hold an arbitrary block id.
        lora_request: The LoRA adapter; None for the base model.
        guided_row: Set for the companion of a request (`RequestPair`): the row of that request, which starts in the
            same step. Both always sample in the same step, and the token of `guided_row` is appended to both.
        items: The spans of its images, audio and embeddings.
        combiner, combiner_settings: Of a companion: how the logits of both are combined, as in RequestPair.
    """

    request_id: str
    row: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: list[int]
    pooling_params: PoolingParams | None = None
    more_block_ids: list[list[int]] = []
    lora_request: LoRARequest | None = None
    guided_row: int | None = None
    items: list[ItemSpan] = []
    combiner: str = ""
    combiner_settings: bytes = b""


class SchedulerOutput(msgspec.Struct, omit_defaults=True):
    """The plan of one step. For running requests it holds only integers and bitmasks.

    Attributes:
        step: Number of the step, from 0.
        freed_rows: Rows whose request finished or was preempted since the last plan. Applied first.
        new_requests: Rows that start. Applied second.
        new_block_rows, new_block_ids: Blocks appended to the tables of rows that were already running. Applied third.
            The table of row r in KV cache group g has the index r + g * max_num_seqs.
        rows: Rows that compute in this step, in batch order: those with one token besides draft tokens come first.
        num_scheduled_tokens: Tokens that each of `rows` computes, at least one.
        total_num_scheduled_tokens: Their sum.
        draft_token_ids: By position in `rows`, for rows that sample: draft tokens. They are the last of the row's
            scheduled tokens, after the known ones, so that the model predicts the token after each of them. Each of a
            row may be PLACEHOLDER: the plan was made before the results of the row's last step. A worker takes the
            draft tokens that it proposed for the row after that step, at most as many; without any the row computes
            its last token alone. The row's position, too, is the one that the worker knows.
        max_draft_tokens: Most tokens of the drafts that are proposed after this step; None for the engine's setting.
        mask_rows: Those of `rows` whose sampling in this step is restricted by a token mask (structured outputs). A row
            with draft tokens is repeated: its masks are those of the token behind its known tokens, and of the token
            behind each draft token.
        token_masks: The masks of `mask_rows`, concatenated: one bit per token of the vocabulary, set if the token is
            allowed. Token t is bit t % 8 of byte t // 8. Each mask is padded to a multiple of 4 bytes.
        masks_follow: Whether masks are sent later because they depend on unknown tokens. Workers then sample only in
            `WorkerProtocol.sample_tokens`, which has the masks. Requires workers with that method.
        read_slots: Of models with sequence states, the state slot that each of `rows` reads; -1 for a sequence that
            starts, whose state is zeros. BEHIND_ACCEPTED for a row whose last step has draft tokens and was not back
            when the plan was made: the worker takes the slot behind the last token of that step that it has accepted.
            Empty for other models.
        write_slots: The state slot that each of `rows` writes: the state behind its known tokens. Empty for models
            without sequence states.
        draft_slots: By position in `rows`, for rows with draft tokens in models with sequence states: the state slots
            behind each draft token. The next plan of the row reads one of them, or that of `write_slots`.
        saved_blocks, saved_host_blocks: Pairs of a KV block and a host block, to which its contents are copied. These
            copies come first: a block may be one that this step writes anew. See `kv_transfer.host_kv_cache`.
        loaded_blocks, loaded_host_blocks: Likewise, in the other direction. Second, before anything is computed.
        saved_states, saved_host_states, loaded_states, loaded_host_states: The same for slots of sequence states.
        freed_encoder_outputs: Content hashes of encoder results that are dropped, before anything is encoded.
        encoder_inputs: Items whose encoders run before the model. Every item that a row reads in this step is among
            them or was in an earlier plan, and has not been freed.
    """

    step: int
    freed_rows: list[int] = []
    new_requests: list[NewRequestData] = []
    new_block_rows: list[int] = []
    new_block_ids: list[int] = []
    rows: list[int] = []
    num_scheduled_tokens: list[int] = []
    total_num_scheduled_tokens: int = 0
    draft_token_ids: dict[int, list[int]] = {}
    mask_rows: list[int] = []
    token_masks: bytes = b""
    masks_follow: bool = False
    read_slots: list[int] = []
    write_slots: list[int] = []
    saved_blocks: list[int] = []
    saved_host_blocks: list[int] = []
    loaded_blocks: list[int] = []
    loaded_host_blocks: list[int] = []
    saved_states: list[int] = []
    saved_host_states: list[int] = []
    loaded_states: list[int] = []
    loaded_host_states: list[int] = []
    freed_encoder_outputs: list[bytes] = []
    encoder_inputs: list[EncoderInput] = []
    max_draft_tokens: int | None = None
    draft_slots: dict[int, list[int]] = {}

    @property
    def has_host_copies(self) -> bool:
        """Whether anything is copied to or from host blocks."""
        return bool(self.saved_blocks or self.loaded_blocks or self.saved_states or self.loaded_states)


class ModelRunnerOutput(msgspec.Struct, omit_defaults=True):
    """The result of one step. Lists are parallel to `SchedulerOutput.rows`; dicts are keyed by position in it.

    Attributes:
        step: The plan's step.
        sampled_token_ids: The sampled token of each row, or -1 if it has not reached the end of its known tokens.
        further_token_ids: The tokens sampled after that one, for rows with accepted draft tokens.
        draft_token_ids: New draft tokens, to follow the sampled tokens in a later plan.
        logprobs: Log-probabilities at the sampled token, for rows that request them.
        further_logprobs: Log-probabilities at `further_token_ids`, for rows that request them.
        prompt_logprobs: Log-probabilities of the prompt tokens that this step predicts, if requested. Position p of the
            prompt predicts token p + 1, so a step over positions [a, b) gives tokens [a + 1, min(b + 1, num_prompt)).
        errors: Failure reasons of single rows, for instance NaN logits. The other rows are valid.
        pooler_output: The pooled vectors of pooling requests whose prompt is complete: float32 in little-endian order.
            No token is sampled for these rows.
        conditional_logprobs: Of rows with a companion that request log-probabilities: the log-probability of the
            sampled token in the row's own logits.
        encoder_seconds: Time that the step's encoders took, as the host sees it (where devices compute asynchronously,
            the time to submit the work); 0 without any, and where the first pipeline stage is another rank.
        num_draft_tokens: The number of draft tokens verified, for rows in whose plan placeholders stood for them.
        undrafted: Positions of rows for which no draft tokens are ever proposed, because logits processors act on them.
    """

    step: int
    sampled_token_ids: list[int] = []
    further_token_ids: dict[int, list[int]] = {}
    draft_token_ids: dict[int, list[int]] = {}
    logprobs: dict[int, PositionLogprobs] = {}
    further_logprobs: dict[int, list[PositionLogprobs]] = {}
    prompt_logprobs: dict[int, list[PositionLogprobs]] = {}
    errors: dict[int, str] = {}
    pooler_output: dict[int, bytes] = {}
    conditional_logprobs: dict[int, float] = {}
    encoder_seconds: float = 0.0
    num_draft_tokens: dict[int, int] = {}
    undrafted: list[int] = []
