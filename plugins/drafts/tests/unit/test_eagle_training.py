"""The passes of training are those of drafting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from plugins.drafts.tests.eagle_heads import EPS, HEAD_SIZE, HEADS, KV_HEADS, MLP_SIZE, SIZE, ReferenceHead

from ci.draft_heads.head import EagleHead, HeadConfig
from ci.draft_heads.train import IGNORED, Batch, loss_of, save, to_draft_tokens
from tests.helpers.model_zoo import VOCAB_SIZE

T = 6


@pytest.fixture
def head() -> EagleHead:
    torch.manual_seed(0)
    sizes = (VOCAB_SIZE, 50, SIZE, MLP_SIZE, HEADS, KV_HEADS, HEAD_SIZE, EPS, 10000.0, 64, (0, 1, 2))
    head = EagleHead(HeadConfig(*sizes), torch.randn(VOCAB_SIZE, SIZE))
    with torch.no_grad():
        for parameter in head.parameters():  # as they are saved
            parameter.copy_((parameter * 1.5).to(torch.bfloat16).float())
    return head


@torch.inference_mode()
def test_each_pass_gives_the_logits_of_that_draft_token(head: EagleHead, tmp_path: Path) -> None:
    tokens, states = torch.randint(VOCAB_SIZE, (1, T)), torch.randn(1, T, 3 * SIZE)
    passes = head.draft(tokens, states, 3)
    save(head, torch.arange(0, 250, 5), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    reference = ReferenceHead(tmp_path, {"model.embed_tokens.weight": head.embedding})
    reference.tensors = {name: t.float() if t.is_floating_point() else t for name, t in reference.tensors.items()}
    fused = reference.fuse(states[0])
    for known in range(1, T - 1):  # positions with states of the model
        read = fused[:known]
        for number in range(min(3, T - known + 1)):
            results = reference.run(tokens[0, : len(read)], read)
            at = known - 1 + number
            logits = head.lm_head(head.norm(results[-1]))
            torch.testing.assert_close(passes[number].logits[0, at], logits, rtol=1e-4, atol=1e-4)
            read = torch.cat((read, results[-1:]))
            if len(read) > T:
                break
    assert (reference.tensors["d2t"] + torch.arange(50)).tolist() == list(range(0, 250, 5))


def test_the_loss_falls_and_leaves_out_tokens_without_a_draft_token(head: EagleHead) -> None:
    draft_ids = torch.full((VOCAB_SIZE,), IGNORED)
    draft_ids[torch.arange(0, 250, 5)] = torch.arange(50)
    assert to_draft_tokens(torch.tensor([5, 6, IGNORED]), draft_ids).tolist() == [1, IGNORED, IGNORED]
    states = torch.randn(2, T, 3 * SIZE), torch.ones(2, T, SIZE)
    batch = Batch(torch.randint(VOCAB_SIZE, (2, T)), 5 * torch.randint(50, (2, T)), *states)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    losses = []
    for _ in range(12):
        loss = loss_of(head, batch, draft_ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
