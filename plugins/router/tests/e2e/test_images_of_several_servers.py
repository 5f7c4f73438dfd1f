"""Images behind a router of prefill and decode servers, and with several API servers and replicas."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest
from plugins.router.tests.e2e.test_prefill_decode import RouterProcess

from tests.e2e.server.test_images import chat, content, image_part, picture, text_part
from tests.e2e.server.test_multi_api_server import TWO_AND_TWO, clients_of_each
from tests.helpers.multimodal_zoo import make_checkpoint
from tests.helpers.processes import assert_nothing_left, shared_memory_names
from tests.helpers.server import SMALL, ServerProcess

pytestmark = pytest.mark.exhaustive

WORDS = "Describe the picture above in as many words as there are colours in it, and then some more."
COLOURS = ("red", "blue", "green")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    model = make_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("model") / "model")
    return (str(model), "--port", "0", "--served-model-name", "eyes", "--dtype", "float32", "--platform", "cpu", *SMALL)


@pytest.fixture(scope="module")
def answers(arguments: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Those of one server, by colour."""
    with ServerProcess(tmp_path_factory.mktemp("one"), *arguments) as server:
        with server.wait_ready().client() as client:
            found = {colour: ask(client, colour) for colour in COLOURS}
    assert len(set(found.values())) == len(COLOURS)
    yield found


def ask(client: httpx2.Client, colour: str, least_cached: int = 0) -> str:
    request = chat(image_part(picture(colour)), text_part(WORDS), max_tokens=16)
    response = client.post("/v1/chat/completions", json=request)
    usage = response.json().get("usage") or {}
    assert usage["prompt_tokens_details"]["cached_tokens"] >= least_cached, response.text
    return content(response)


def num_encoded(server: ServerProcess) -> float:
    """Items whose encoder has run."""
    with server.client() as client:
        metrics = client.get("/metrics").text
    queries, hits = (
        sum(map(float, re.findall(rf"^mvllm:encoder_cache_{kind}_total(?:\{{.*\}})? (\S+)$", metrics, re.MULTILINE)))
        for kind in ("queries", "hits")
    )
    return queries - hits


def test_a_router_sends_images_to_both_servers(
    arguments: tuple[str, ...], answers: dict[str, str], tmp_path: Path
) -> None:
    before = shared_memory_names()
    with ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(ServerProcess(tmp_path, *arguments, "--kv-role", role))
            for role in ("producer", "consumer")
        )
        urls = ("--prefill", prefill.url, "--decode", decode.url)
        router = stack.enter_context(RouterProcess(tmp_path, *urls, "--port", "0", "--prefill-timeout", "60"))
        for server in (prefill, decode, router):
            server.wait_ready()
        with router.client() as client:
            for colour in COLOURS:  # whole blocks of 100 tokens come from the other server
                assert ask(client, colour, least_cached=96) == answers[colour]
            url = chat(image_part("http://127.0.0.1:9/none.png"), text_part("what"))
            refused = client.post("/v1/chat/completions", json=url)
            assert refused.status_code == 400, refused.text
        assert (num_encoded(prefill), num_encoded(decode)) == (len(COLOURS), 0)
        tags = [server.tag for server in (prefill, decode, router)]
    for tag in tags:
        assert_nothing_left(tag, before)


def test_several_api_servers_and_replicas_share_images(
    arguments: tuple[str, ...], answers: dict[str, str], tmp_path: Path
) -> None:
    before = shared_memory_names()
    with ServerProcess(tmp_path, *arguments, *TWO_AND_TWO) as server, ExitStack() as stack:
        server.wait_ready()
        for client in clients_of_each(server, stack):
            for _ in range(2):
                for colour in COLOURS:
                    assert ask(client, colour) == answers[colour]
        assert num_encoded(server) <= 2 * len(COLOURS)
        tag = server.tag
    assert_nothing_left(tag, before)
