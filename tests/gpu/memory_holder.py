"""Another program that holds device memory: `python -m tests.gpu.memory_holder PLATFORM BYTES` leaves BYTES free.

It says `holds N bytes` when it has them, and gives them back when its standard input ends.
"""

from __future__ import annotations

import sys

from tests.gpu.device import open_device

SMALLEST = 16 << 20


def main() -> None:
    """See the module."""
    import torch

    platform, spare = sys.argv[1], int(sys.argv[2])
    with open_device(platform) as runtime:
        held, size = [], 1 << 33
        while size >= SMALLEST:
            if runtime.memory().free < size + spare:
                size //= 2
                continue
            try:
                held.append(runtime.empty((size,), torch.uint8))
            except MemoryError:
                size //= 2
        print(f"holds {sum(tensor.nbytes for tensor in held)} bytes", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
