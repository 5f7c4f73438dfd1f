"""Mutants of the example device with faults in sparse attention: the fields of `mutants.Mutant`."""

from __future__ import annotations

_SELECT = "        return super().select(query, weights, kv, metadata)\n"

SPARSE_ATTENTION_MUTANTS = (
    (
        "an indexer takes negative weights for positive ones",
        "ATT-15",
        "attention.py",
        _SELECT,
        _SELECT.replace("weights, kv", "weights.abs(), kv"),
    ),
    (
        "of equal scores the later positions are selected",
        "ATT-15",
        "attention.py",
        _SELECT,
        "        chosen = torch.full((len(query), self.spec.index_topk), -1, dtype=torch.int32)\n"
        "        for sequence in metadata.sequences:\n"
        "            keys = self._read(kv, sequence.blocks, sequence.end)[0].squeeze(1).cpu()\n"
        "            for token in range(sequence.tokens.start, sequence.tokens.stop):\n"
        "                seen = sequence.begin + token - sequence.tokens.start + 1\n"
        "                products = (query[token].cpu().float() @ keys[:seen].T * self.spec.scale).relu()\n"
        "                scores = (weights[token].cpu() @ products).flip(0)\n"
        "                order = scores.sort(stable=True, descending=True).indices[: self.spec.index_topk]\n"
        "                chosen[token, : len(order)] = (seen - 1 - order).int()\n"
        "        return chosen.to(query.device)\n",
    ),
    (
        "a query attends to all tokens whatever is selected",
        "ATT-16",
        "attention.py",
        "        return super().forward_selected(query, kv, metadata, positions)\n",
        "        return super().forward(query, kv, metadata)\n",
    ),
    (
        "positions are taken for slots",
        "ATT-16",
        "attention.py",
        "        return super().forward_selected(query, kv, metadata, positions)\n",
        "        import dataclasses\n\n"
        "        table = torch.arange(metadata.block_table.shape[1], dtype=torch.int32).to(query.device)\n"
        "        moved = dataclasses.replace(metadata, block_table=table.expand_as(metadata.block_table))\n"
        "        return super().forward_selected(query, kv, moved, positions)\n",
    ),
)
