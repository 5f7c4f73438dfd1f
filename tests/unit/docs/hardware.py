"""What has run where, as docs/reference/hardware.toml states it, for the pages that repeat it."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
FILE = ROOT / "docs" / "reference" / "hardware.toml"
OTHERS = {"example": "host memory"}
"""Platforms of the repository that are not for hardware."""


@dataclass(frozen=True)
class Hardware:
    """A platform of the repository.

    Attributes:
        platform: Its name.
        package: Its distribution.
        meant_for: The hardware that it is written for.
        ran: What it has run on, as a noun phrase.
        link: A page with evidence, from the top of the repository.
    """

    platform: str
    package: str
    meant_for: str
    ran: str
    link: str


@dataclass(frozen=True)
class Unproven:
    """Hardware that nothing has run on: a sentence that names it and says that something runs needs other words, too.

    Attributes:
        names: Pattern of its names.
        unless: Pattern of the words that make such a sentence true.
    """

    names: re.Pattern[str]
    unless: re.Pattern[str]


_CONTENT = tomllib.loads(FILE.read_text(encoding="utf-8"))
UNPROVEN = [Unproven(re.compile(each["names"]), re.compile(each["unless"])) for each in _CONTENT.pop("unproven")]
PLATFORMS = {
    name: Hardware(name, entry["package"], entry["for"], entry["ran"], entry["link"])
    for name, entry in _CONTENT.items()
}


def ran_on(platform: str) -> str:
    """What a platform of the repository has run on; of others, that the file does not know them."""
    if platform in OTHERS:
        return OTHERS[platform]
    return PLATFORMS[platform].ran if platform in PLATFORMS else "not in docs/reference/hardware.toml"


def table(*, to_root: str) -> str:
    """The table of README.md and docs/reference/features.md.

    Args:
        to_root: From the page's folder to the top of the repository: empty, or for instance `../../`.
    """
    rows = [
        f"| `{each.package}` | {each.meant_for} | [{each.ran}]({to_root}{each.link}) |" for each in PLATFORMS.values()
    ]
    return "\n".join(["| package | written for | has run on |", "|---|---|---|", *rows])


def plain(text: str) -> str:
    """A page's text without emphasis, code marks and the addresses of links, on one line a paragraph."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[ \t]*\n(?!\n|\||#|- |\d+\. )[ \t]*", " ", re.sub(r"[*`]", "", text))


def untrue_claims(page: str) -> list[str]:
    """Sentences and rows of a page that say that something runs on hardware on which nothing has run."""
    found = []
    for sentence in re.split(r"\n+|(?<=[.:;!?]) ", plain(page)):
        if re.search(r"\b(runs?|ran|tested|measured|proved|hardware)\b(?! (time|through transformers))", sentence):
            for each in UNPROVEN:
                if each.names.search(sentence) and not each.unless.search(sentence):
                    found.append(sentence.strip())
    return found
