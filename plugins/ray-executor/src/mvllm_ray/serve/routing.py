"""Routers of Ray Serve: which replica a request is sent to.

    prefix        the replica where the request costs least: its cached prefix is worth the tokens that it saves, its
                  load costs the tokens that wait there (mvllm's PrefixRouter; what is cached is estimated from what was
                  sent)
    round_robin   each in turn
    power_of_two  Serve's own: the less busy of two random replicas

The ingress runs them: one router for each model and replica of the ingress.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from mvllm.extension_api.kv_events import root_key
from mvllm_router.prefix_router import PrefixRouter, RoutedRequest

CHUNK = 64
"""Units of a prompt per chunk of a prefix: tokens, or four bytes of a text."""
_BYTES_PER_UNIT = 4
EXPECTED_OUTPUT_TOKENS = 256
"""Output tokens that are expected of a request, unless it limits them to fewer."""


class ForwardedRequest:
    """An HTTP request on its way to a replica.

    Args:
        method: Its method.
        target: Path and query.
        headers: All headers, except those of the connection.
        body: The body.

    Attributes:
        prompt: What the router compares; about one integer for each token. Not sent to the replica.
        root: Key of what separates caches, such as a cache salt. Not sent to the replica.
        num_output_tokens: Output tokens that are expected of it. Not sent to the replica.
    """

    def __init__(self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.body = body
        self.prompt: Sequence[int] = ()
        self.root = 0
        self.num_output_tokens = EXPECTED_OUTPUT_TOKENS
        self._routed: tuple[_LockedRouter, RoutedRequest[str]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardedRequest, (self.method, self.target, self.headers, self.body)

    def set_routed(self, router: _LockedRouter, routed: RoutedRequest[str]) -> None:
        """A router has counted the request as sent."""
        self.finish()
        self._routed = router, routed

    def is_routed_to(self, replica: str) -> bool:
        """Whether the request is counted as sent to a replica."""
        return self._routed is not None and self._routed[1].replica == replica

    def first_output(self) -> None:
        """The replica has answered: the prompt is computed."""
        if self._routed is not None:
            self._routed[0].prompt_computed(self._routed[1])

    def finish(self) -> None:
        """The request is no longer counted as sent. Idempotent."""
        routed, self._routed = self._routed, None
        if routed is not None:
            routed[0].finish(routed[1])


class _LockedRouter:
    """A PrefixRouter for two threads: the ingress runs in one event loop, Serve's routers in another."""

    def __init__(self) -> None:
        self._router: PrefixRouter[str] = PrefixRouter(chunk=CHUNK)
        self._lock = threading.Lock()

    def set_replicas(self, names: set[str]) -> None:
        with self._lock:
            for name in set(self._router.replicas) - names:
                self._router.remove_replica(name)
            for name in sorted(names - set(self._router.replicas)):
                self._router.add_replica(name)

    def choose(self, request: ForwardedRequest, among: Sequence[str]) -> str:
        request.finish()
        with self._lock:
            for name in among:  # a replica may be offered before its announcement has been processed
                self._router.add_replica(name)
            routed = self._router.choose(
                request.prompt, root=request.root, num_output_tokens=request.num_output_tokens, among=among
            )
        request.set_routed(self, routed)
        return routed.replica

    def prompt_computed(self, routed: RoutedRequest[str]) -> None:
        with self._lock:
            self._router.prompt_computed(routed)

    def finish(self, routed: RoutedRequest[str]) -> None:
        with self._lock:
            self._router.finish(routed)


def _request_of(pending: PendingRequest | None) -> ForwardedRequest | None:
    """The request of the ingress; None for other calls.

    Serve sends the router's class as a copy with a module of its own, in which ForwardedRequest is another class than
    that of the ingress: `isinstance` would always be false.
    """
    if pending is not None and pending.args and hasattr(pending.args[0], "set_routed"):
        request: ForwardedRequest = pending.args[0]
        return request
    return None


class PrefixAwareRouter(RequestRouter):  # type: ignore[misc]  # Ray's types are not read
    """Sends requests that begin alike to the replica that has their beginning cached, unless it is too busy."""

    def initialize_state(self, **settings: Any) -> None:
        """Called by Serve before the first request."""
        self._prefixes = _LockedRouter()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve when replicas have started or stopped."""
        super().update_replicas(replicas)
        self._prefixes.set_replicas({each.replica_id.unique_id for each in replicas})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Serve when it notices that a replica is lost."""
        super().on_replica_actor_died(replica_id)
        self._prefixes.set_replicas({each.unique_id for each in self._replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The chosen replica, then the others: Serve takes the first that has room."""
        request = _request_of(pending_request)
        if request is None or not candidate_replicas:
            return [candidate_replicas]
        chosen = self._prefixes.choose(request, [each.replica_id.unique_id for each in candidate_replicas])
        best = [each for each in candidate_replicas if each.replica_id.unique_id == chosen]
        return [best, [each for each in candidate_replicas if each not in best]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Serve when a replica has accepted the request. The chosen one may have been full."""
        request = _request_of(pending_request)
        if request is not None and not request.is_routed_to(replica_id.unique_id):
            self._prefixes.choose(request, [replica_id.unique_id])


class RoundRobinRouter(RequestRouter):  # type: ignore[misc]
    """Sends requests to each replica in turn."""

    def initialize_state(self, **settings: Any) -> None:
        """Called by Serve before the first request."""
        self._turn = 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All replicas, from the next one on."""
        ordered = sorted(candidate_replicas, key=lambda each: each.replica_id.unique_id)
        self._turn += 1
        start = self._turn % max(len(ordered), 1)
        return [[each] for each in (*ordered[start:], *ordered[:start])]


ROUTER_CLASSES = {
    "prefix": f"{__name__}.PrefixAwareRouter",
    "round_robin": f"{__name__}.RoundRobinRouter",
    "power_of_two": None,
}
"""Serve's import path for each way of routing; None for Serve's own."""


def prompt_units(body: Any) -> Sequence[int]:
    """What the prompt of a request begins with, as integers: about one for each token.

    Args:
        body: The decoded body of a request in the format of OpenAI, Anthropic or Ollama.

    Returns:
        Token ids where the prompt has them, otherwise four bytes of its text in each integer. Empty if there is no
        prompt.
    """
    if not isinstance(body, dict):
        return ()
    prompt = body.get("prompt", body.get("input"))
    if isinstance(prompt, list) and prompt:
        first = prompt[0]
        if isinstance(first, int):
            return [each for each in prompt if isinstance(each, int)]
        if isinstance(first, list) and first and isinstance(first[0], int):
            return [each for each in first if isinstance(each, int)]
    # In the order in which chat templates have them.
    parts = [body.get(name) for name in ("tools", "system", "instructions", "messages", "prompt", "input")]
    data = b"".join(_bytes_of(part) for part in parts if part)
    units = array("I")
    units.frombytes(data[: len(data) // _BYTES_PER_UNIT * _BYTES_PER_UNIT])
    return units.tolist()


def expected_output_tokens(body: Any) -> int:
    """Output tokens that are expected of a request."""
    if not isinstance(body, dict):
        return 0
    limits = [body.get(name) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")]
    return min([limit for limit in limits if isinstance(limit, int) and limit >= 0] + [EXPECTED_OUTPUT_TOKENS])


def _bytes_of(part: Any) -> bytes:
    """The content of a part of a prompt. If a list grows at its end, so do its bytes."""
    if isinstance(part, str):
        return part.encode(errors="backslashreplace")
    if isinstance(part, list):
        return b"".join(_bytes_of(each) for each in part)
    if isinstance(part, dict):
        known = [part[name] for name in ("role", "content", "text") if part.get(name)]
        return b"".join(_bytes_of(each) + b"\0" for each in known) if known else msgspec.json.encode(part)
    return b""


def cache_root(body: Any, model: str) -> int:
    """The key that separates requests which never share cached blocks: by model name, as of adapters, and by salt."""
    pairs = [("model", model)]
    if isinstance(body, dict) and isinstance(salt := body.get("cache_salt"), str):
        pairs.append(("cache_salt", salt))
    return root_key(pairs)
