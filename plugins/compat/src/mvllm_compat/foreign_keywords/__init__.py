"""Keywords of other engines, for the settings of an engine and for the options of a server."""

from __future__ import annotations

from mvllm.extension_api.foreign_keywords import ForeignKeywords
from mvllm_compat.foreign_keywords.engine import FOREIGN_KEYWORDS
from mvllm_compat.foreign_keywords.server import FOREIGN_SERVER_OPTIONS

KEYWORDS = ForeignKeywords(engine=FOREIGN_KEYWORDS, server=FOREIGN_SERVER_OPTIONS)
