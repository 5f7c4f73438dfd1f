"""Compares the engine with an in-process worker on the example device with transformers: `<checkpoint> ...`.

It is a separate program, because a process can register only one foreign torch device and cannot unregister it.
"""

from __future__ import annotations

import sys

from tests.helpers import parity


def main() -> None:
    for name in sys.argv[1:]:
        expected = parity.oracle(name)
        settings = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "state_snapshot_interval": 16}
        with parity.engine(expected.folder, platform="example", **settings) as llm:
            parity.check(expected, parity.generate(llm, expected.prompts[:8]))
            again = parity.generate(llm, expected.prompts[:8])
            parity.check(expected, again)
            assert max(output.num_cached_tokens for output in again) > 0
        print(name, "is equal", flush=True)


if __name__ == "__main__":
    main()
