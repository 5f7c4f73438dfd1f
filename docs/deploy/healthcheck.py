"""Exits with status 0 if the server of this container accepts requests."""

import http.client
import os
import sys

PORT = int(os.environ.get("HEALTHCHECK_PORT", "8000"))

try:
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=4)
    connection.request("GET", "/health/ready")
    response = connection.getresponse()
    reason = "" if response.status == 200 else f"status {response.status}: {response.read(500)!r}"
except OSError as error:
    reason = f"no answer on port {PORT}: {error}"
sys.exit(reason or 0)
