"""`python -m mvllm`: the command `mvllm`, of this interpreter."""

from __future__ import annotations

import sys

from mvllm.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
