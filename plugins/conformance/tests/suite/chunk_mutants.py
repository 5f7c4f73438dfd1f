"""Mutants of the example device with faults in chunks of prompts: the fields of `mutants.Mutant`."""

from __future__ import annotations

_STEP = "        return super().build_metadata(batch)\n"


def _of_long_chunks(change: str) -> str:
    """Changes the sequences with new tokens of at least 2,048 tokens before the first of them is computed."""
    return (
        "        import dataclasses\n\n"
        "        step = super().build_metadata(batch)\n"
        "        sizes = [s.tokens.stop - s.tokens.start for s in step.sequences]\n"
        f"        changed = [dataclasses.replace(s, {change}) if n >= 2048 else s\n"
        "                   for n, s in zip(sizes, step.sequences)]\n"
        "        return dataclasses.replace(step, sequences=tuple(changed))\n"
    )


CHUNK_MUTANTS = (
    (
        "chunks of two tokens are not causal",
        "ATT-03",
        "attention.py",
        _STEP,
        "        import dataclasses\n\n"
        "        step = super().build_metadata(batch)\n"
        "        pairs = [s.tokens.stop - s.tokens.start == 2 for s in step.sequences]\n"
        "        moved = [dataclasses.replace(s, begin=s.begin + p) for s, p in zip(step.sequences, pairs)]\n"
        "        return dataclasses.replace(step, sequences=tuple(moved))\n",
    ),
    (
        "long chunks are masked from the upper left corner, whatever is before them",
        "ATT-03",
        "attention.py",
        _STEP,
        _of_long_chunks("begin=0, end=n"),
    ),
    (
        "long chunks see one token of their future",
        "ATT-03",
        "attention.py",
        _STEP,
        _of_long_chunks("begin=s.begin + 1"),
    ),
)
