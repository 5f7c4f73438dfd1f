"""Addresses of OpenAI-compatible servers, as people write them."""

from __future__ import annotations


def join_url(base_url: str, path: str) -> str:
    """A URL whose base may end with a slash, or with the `/v1` with which the path begins."""
    base = base_url.rstrip("/")
    if base.endswith("/v1") and path.startswith("/v1/"):
        base = base.removesuffix("/v1")
    return base + path
