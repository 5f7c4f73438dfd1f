"""docs/reference/metrics.md has the router's metrics."""

from __future__ import annotations

from plugins.router.tests import metrics_page


def test_the_table_is_up_to_date() -> None:
    assert metrics_page.page() == metrics_page.PAGE.read_text(encoding="utf-8"), (
        f"run: python -m {metrics_page.__name__}"
    )
