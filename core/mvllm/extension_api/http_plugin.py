"""The class of HTTP plugins with routes at the root of the server; for the module of their entry point.

Importing it loads no web framework: the module is imported whenever `mvllm serve` starts. What routes need is in
`mvllm.extension_api.http`.
"""

from mvllm.entrypoints.http_plugin import HTTPPlugin as HTTPPlugin

__all__ = ["HTTPPlugin"]
