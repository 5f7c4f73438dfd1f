"""For packages with methods of speculative decoding: what runs on workers, see `mvllm.extension_api.proposers`."""

from mvllm.models.draft_head import DraftHead as DraftHead
from mvllm.models.mtp_head import LlamaMTPHead as LlamaMTPHead
from mvllm.models.mtp_head import MTPHead as MTPHead
from mvllm.models.mtp_head import MTPNames as MTPNames
from mvllm.sampling.token_history import TokenHistory as TokenHistory
from mvllm.worker.spec_decode.head_proposer import HeadProposer as HeadProposer
from mvllm.worker.spec_decode.proposer import DraftStep as DraftStep
from mvllm.worker.spec_decode.proposer import Proposer as Proposer
from mvllm.worker.spec_decode.proposer import ProposerContext as ProposerContext
from mvllm.worker.step_inputs import ragged_ranges as ragged_ranges

__all__ = [
    "DraftHead",
    "DraftStep",
    "HeadProposer",
    "LlamaMTPHead",
    "MTPHead",
    "MTPNames",
    "Proposer",
    "ProposerContext",
    "TokenHistory",
    "ragged_ranges",
]
