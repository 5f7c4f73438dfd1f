"""Measures torch's rate of matrix products: answers each input line with 10^9 operations per second.

Prints one line at the start, then answers {"bf16": .., "int8": ..}; the product is 2048 x 1024 by 1024 x 4096.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

ROWS, INNER, COLUMNS = 2048, 1024, 4096


def rate(product: Callable[[], object], repeats: int = 5) -> float:
    """The best of a few."""
    product()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - start)
    return 2 * ROWS * INNER * COLUMNS / min(seconds) / 1e9


def main() -> None:
    import torch

    torch.set_num_threads(int(sys.argv[1]))
    x, w = torch.randn(ROWS, INNER).bfloat16(), torch.randn(COLUMNS, INNER).bfloat16()
    qx, qw = (torch.randint(-127, 127, (rows, INNER), dtype=torch.int8) for rows in (ROWS, COLUMNS))
    print(json.dumps({"torch": torch.__version__}), flush=True)
    for _ in sys.stdin:
        rates = {
            "bf16": rate(lambda: torch.nn.functional.linear(x, w)),
            "int8": rate(lambda: torch._int_mm(qx, qw.t())),
        }
        print(json.dumps(rates), flush=True)


if __name__ == "__main__":
    main()
