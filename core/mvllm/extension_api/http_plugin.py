"""For the module of the entry point of an HTTP plugin with routes at the root of the server: its class, and options.

Importing it loads no web framework: the module is imported whenever `mvllm serve` starts. What routes need is in
`mvllm.extension_api.http`.
"""

from mvllm.config.human_readable_int import human_readable_int as human_readable_int
from mvllm.entrypoints.http_plugin import HTTPPlugin as HTTPPlugin

__all__ = ["HTTPPlugin", "human_readable_int"]
