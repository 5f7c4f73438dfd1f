"""Mutants of the example device with faults in non-causal spans: the fields of `mutants.Mutant`."""

from __future__ import annotations

_STEP = "        return super().build_metadata(batch)\n"

NON_CAUSAL_SPAN_MUTANTS = (
    (
        "spans are causal",
        "ATT-17",
        "attention.py",
        _STEP,
        "        import dataclasses\n\n"
        "        batch = dataclasses.replace(batch, visible_lens=None, visible_lens_device=None)\n" + _STEP,
    ),
    (
        "tokens of a span see all tokens of the step",
        "ATT-17",
        "attention.py",
        _STEP,
        "        if batch.visible_lens is not None:\n"
        "            import dataclasses\n\n"
        "            import numpy as np\n\n"
        "            counts = np.diff(batch.query_start_loc)\n"
        "            ends, first = batch.seq_lens.repeat(counts), batch.query_start_loc[:-1].repeat(counts)\n"
        "            own = np.arange(len(ends)) - first + ends - counts.repeat(counts) + 1\n"
        "            seen = batch.visible_lens.copy()\n"
        "            seen[: len(ends)] = np.where(seen[: len(ends)] > own, ends, seen[: len(ends)])\n"
        "            on_device = torch.from_numpy(seen).to(batch.seq_lens_device.device)\n"
        "            batch = dataclasses.replace(batch, visible_lens=seen, visible_lens_device=on_device)\n" + _STEP,
    ),
    (
        "a sliding window hides nothing from the tokens of spans",
        "ATT-17",
        "attention.py",
        "    def build_metadata(self, batch",
        "    def _attend(self, query, key, value, begin, visible_lens, sinks):\n"
        "        import dataclasses\n\n"
        "        found, spec = super()._attend(query, key, value, begin, visible_lens, sinks), self.spec\n"
        "        if visible_lens is None or spec.sliding_window is None:\n"
        "            return found\n"
        "        self.spec = dataclasses.replace(spec, sliding_window=None)\n"
        "        wide = super()._attend(query, key, value, begin, visible_lens, sinks)\n"
        "        self.spec = spec\n"
        "        inside = visible_lens.cpu() > torch.arange(begin, begin + len(query)) + 1\n"
        "        return torch.where(inside.view(-1, 1, 1).to(found.device), wide, found)\n\n"
        "    def build_metadata(self, batch",
    ),
)
