#!/usr/bin/env python3
"""Fills the address of the source into README.md, for package metadata and release notes.

    MVLLM_SOURCE_URL=ADDRESS python3 ci/source_address.py VERSION      prints README.md as the release shows it

The repository's files name no address, because a copy of them may lie anywhere. A release knows its own: the workflow
sets MVLLM_SOURCE_URL, README.md then has a line with it, and its relative links and pictures, which a package index
cannot resolve, lead to the files of the release's tag. Without the variable README.md stays as it is.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VARIABLE = "MVLLM_SOURCE_URL"
MARK = "<!-- source address -->"


def with_address(readme: str, url: str, version: str) -> str:
    """README.md with the address of the source.

    Args:
        readme: Its text, with `MARK` once.
        url: Address of the repository on a forge whose paths are GitHub's; empty leaves the text unchanged.
        version: The release's; its tag is `v` and the version.

    Raises:
        ValueError: The text has no `MARK`, or the address is not one of https.
    """
    url = check_address(url)
    if not url:
        return readme
    if readme.count(MARK) != 1:
        raise ValueError(f"README.md needs the line {MARK} once.")
    return absolute_links(readme.replace(MARK, f"Source: <{url}>."), url, version)


def check_address(url: str) -> str:
    """The address of a repository without a slash at its end; empty if there is none.

    Raises:
        ValueError: It is not one of https.
    """
    if url and not re.fullmatch(r"https://[\w.-]+(/[\w.~-]+)+/?", url):
        raise ValueError(f"{VARIABLE} is {url!r}: set it to the https address of the repository.")
    return url.rstrip("/")


def absolute_links(text: str, url: str, version: str) -> str:
    """A page in Markdown whose relative links lead to the files of a release's tag; unchanged without an address."""

    def absolute(match: re.Match[str]) -> str:
        before, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        kind = "raw" if target.partition("#")[0].endswith((".svg", ".png")) else "blob"
        return f"{before}({url}/{kind}/v{version}/{target})"

    return re.sub(r"(\])\(([^)\s]+)\)", absolute, text) if url else text


if __name__ == "__main__":
    print(with_address((ROOT / "README.md").read_text(encoding="utf-8"), os.environ.get(VARIABLE, ""), sys.argv[1]))
