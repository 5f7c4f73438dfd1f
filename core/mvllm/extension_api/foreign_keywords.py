"""For packages that know keywords of other engines (`mvllm.foreign_keywords`)."""

from __future__ import annotations

from mvllm.config.foreign_keywords import ForeignKeyword as ForeignKeyword
from mvllm.config.foreign_keywords import ForeignKeywords as ForeignKeywords

__all__ = ["ForeignKeyword", "ForeignKeywords"]
