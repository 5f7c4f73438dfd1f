"""The table of the router's metrics in docs/reference/metrics.md.

python -m plugins.router.tests.metrics_page    writes it from the collector
"""

from __future__ import annotations

from mvllm_router.pool_metrics import PoolCollector, PoolMetrics
from tests.unit.docs.guide_tables import with_table
from tests.unit.docs.metrics_page import PAGE, row


def page() -> str:
    """The complete page."""
    found = PoolCollector(tuple, PoolMetrics()).collect()
    rows = "".join(row(family, tuple(getattr(family, "_labelnames", ()))) for family in found)
    head = "| metric | type | labels | meaning |\n| --- | --- | --- | --- |\n"
    return with_table(PAGE.read_text(encoding="utf-8"), "router", (head + rows).rstrip("\n"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
