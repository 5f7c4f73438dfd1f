"""For packages through which every chunk of many streams passes, such as load generators and routers."""

from __future__ import annotations

from mvllm.http_connection import ConnectionLostError as ConnectionLostError
from mvllm.http_connection import ConnectionPool as ConnectionPool
from mvllm.http_connection import Headers as Headers
from mvllm.http_connection import HTTPConnection as HTTPConnection

__all__ = ["ConnectionLostError", "ConnectionPool", "HTTPConnection", "Headers"]
