"""A server with a model that takes images: every API, hostile contents, and a process that is killed."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2
import numpy as np
import openai
import psutil
import pytest
import torch
from PIL import Image
from safetensors.numpy import save

from tests.helpers.multimodal_zoo import TEXT, make_checkpoint
from tests.helpers.processes import assert_nothing_left, shared_memory_names, tagged_processes
from tests.helpers.server import SMALL, ServerProcess

pytestmark = pytest.mark.exhaustive

PROCESSOR = "mvllm.multimodal.processor_main"


def picture(color: str = "red", size: tuple[int, int] = (40, 24)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes | str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data) if isinstance(data, bytes) else data}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def chat(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": list(parts)}
    return {"model": "eyes", "messages": [message], "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}


class Redirects(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/picture.png":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(picture())
            return
        self.send_response(302)
        self.send_header("Location", self.path.removeprefix("/to/"))
        self.end_headers()

    def log_message(self, *unused: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Redirects)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://localhost:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("images")
    model = make_checkpoint("llava", folder / "model")
    (folder / "media").mkdir()
    (folder / "media" / "picture.png").write_bytes(picture())
    before = shared_memory_names()
    options = ("--allowed-media-domains", "localhost", "--allowed-local-media-path", str(folder / "media"))
    settings = ("--dtype", "float32", "--max-model-len", "512", "--enable-prompt-embeds", "--platform", "cpu", *SMALL)
    with ServerProcess(folder, str(model), "--port", "0", "--served-model-name", "eyes", *settings, *options) as server:
        yield server.wait_ready()
    assert server.wait() == 0, server.log[-3000:]
    assert_nothing_left(server.tag, before)


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx2.Client]:
    with server.client() as client:
        yield client


def content(response: httpx2.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def processors(server: ServerProcess) -> list[psutil.Process]:
    return [each for each in tagged_processes(server.tag) if PROCESSOR in " ".join(each.cmdline())]


def test_images_of_every_origin_are_the_same_image(client: httpx2.Client, server: ServerProcess, site: str) -> None:
    answers = {
        content(client.post("/v1/chat/completions", json=chat(text_part("what"), image_part(each))))
        for each in (picture(), f"{site}/picture.png", f"{site}/to/{site}/picture.png", "picture.png")
    }
    assert len(answers) == 1
    other = client.post("/v1/chat/completions", json=chat(text_part("what"), image_part(picture("blue"))))
    assert content(other) not in answers
    plain = client.post("/v1/chat/completions", json=chat(text_part("what")))
    assert content(plain) not in answers


def test_the_openai_client_with_two_images_and_a_stream(server: ServerProcess) -> None:
    sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    request = chat(text_part("which"), image_part(picture()), image_part(picture("blue")))
    extra = {"ignore_eos": request.pop("ignore_eos")}
    whole = sdk.chat.completions.create(**request, extra_body=extra)
    chunks = sdk.chat.completions.create(**request, extra_body=extra, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert whole.usage is not None and whole.usage.prompt_tokens > 2 * 9  # the rows of both images
    swapped = chat(text_part("which"), image_part(picture("blue")), image_part(picture()))
    swapped.pop("ignore_eos")
    other = sdk.chat.completions.create(**swapped, extra_body=extra)
    assert other.choices[0].message.content != whole.choices[0].message.content


def test_a_placeholder_in_the_text_is_text(client: httpx2.Client) -> None:
    one, two = chat(image_part(picture()), text_part("what")), chat(image_part(picture()), text_part("what <image>"))
    counts = [client.post("/tokenize", json={"messages": each["messages"]}).json()["count"] for each in (one, two)]
    assert counts[0] + 2 <= counts[1] <= counts[0] + len(" <image>")
    assert content(client.post("/v1/chat/completions", json=two))


def test_embeddings_as_a_prompt(client: httpx2.Client) -> None:
    values = np.random.default_rng(0).normal(size=(5, TEXT["hidden_size"])).astype(np.float32)
    file = io.BytesIO()
    np.save(file, values)
    of_torch = io.BytesIO()
    torch.save(torch.from_numpy(values), of_torch)
    contents = (file.getvalue(), save({"x": values}), of_torch.getvalue())
    files = [base64.b64encode(each).decode() for each in contents]
    body = {"model": "eyes", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json={**body, "prompt_embeds": files, "prompt": "hello"})
    assert answer.status_code == 200, answer.text
    texts = [choice["text"] for choice in answer.json()["choices"]]
    assert texts[0] == texts[1] == texts[2] != texts[3]
    for bad, field in (("AAAA", "prompt_embeds"), (base64.b64encode(b"\x80\x02}q\x00.").decode(), "prompt_embeds")):
        refused = client.post("/v1/completions", json={**body, "prompt_embeds": bad})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    refused = client.post("/v1/completions", json={**body, "prompt_embeds": files[0], "echo": True})
    assert refused.status_code == 400


def bomb(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(50 << 20), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


HOSTILE: dict[str, Callable[[str], list[dict[str, Any]]]] = {
    "huge dimensions": lambda site: [image_part(bomb(60_000, 60_000))],
    "a decompression bomb": lambda site: [image_part(bomb(4, 4))],
    "a truncated file": lambda site: [image_part(picture()[:60])],
    "SVG": lambda site: [image_part(data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"))],
    "HTML": lambda site: [image_part(data_url(b"<!doctype html><html>", "text/html"))],
    "no base64": lambda site: [image_part("data:image/png;base64,%%%")],
    "a private address": lambda site: [image_part("http://169.254.169.254/latest/meta-data")],
    "a redirect to a private address": lambda site: [image_part(f"{site}/to/http://127.0.0.1:1/x")],
    "a file elsewhere": lambda site: [image_part("file:///etc/passwd")],
    "a file above": lambda site: [image_part("../model/config.json")],
    "1,000 images": lambda site: [image_part(picture())] * 1000,
    "an image without content": lambda site: [{"type": "image_url"}],
    "a bare place": lambda site: [{"type": "image"}],
    "audio": lambda site: [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
    "an unknown part": lambda site: [{"type": "smell", "smell": "x"}],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_contents_are_refused_in_one_sentence(
    name: str, client: httpx2.Client, server: ServerProcess, site: str
) -> None:
    good = chat(text_part("what"), image_part(picture()))
    expected = content(client.post("/v1/chat/completions", json=good))
    pids = {each.pid for each in tagged_processes(server.tag)}
    memory = server_memory(server)
    answer = client.post("/v1/chat/completions", json=chat(*HOSTILE[name](site)))
    if name == "a decompression bomb":  # more bytes than pixels: the rest is never decompressed
        assert answer.status_code in (200, 400)
    else:
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "messages"), answer.text
        assert "\n" not in error["message"] and "Traceback" not in error["message"]
    assert content(client.post("/v1/chat/completions", json=good)) == expected
    assert {each.pid for each in tagged_processes(server.tag)} == pids
    assert server_memory(server) < memory + (400 << 20)


def server_memory(server: ServerProcess) -> int:
    return sum(each.memory_info().rss for each in tagged_processes(server.tag))


def test_a_killed_processor_is_replaced(client: httpx2.Client, server: ServerProcess) -> None:
    content(client.post("/v1/chat/completions", json=chat(image_part(picture()))))
    [processor] = processors(server)
    os.kill(processor.pid, signal.SIGKILL)
    assert content(client.post("/v1/chat/completions", json=chat(image_part(picture("green")))))
    [after] = processors(server)
    assert after.pid != processor.pid


def test_metrics_and_the_schema_know_of_items(client: httpx2.Client) -> None:
    content(client.post("/v1/chat/completions", json=chat(image_part(picture("yellow")))))
    content(client.post("/v1/chat/completions", json=chat(image_part(picture("yellow")))))
    values = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if not line.startswith("#"))
    found = {name.split("{")[0]: float(value) for name, value in values.items()}
    assert found["mvllm:mm_cache_queries_total"] > found["mvllm:mm_cache_hits_total"] > 0
    assert found["mvllm:mm_processing_time_seconds_count"] > 0
    schema = json.dumps(client.get("/openapi.json").json())
    assert "mm_processor_kwargs" in schema and "prompt_embeds" in schema


def test_a_cache_salt_separates_images(client: httpx2.Client) -> None:
    def hits() -> list[float]:
        lines = client.get("/metrics").text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        found = {name.partition("{")[0]: float(value) for name, value in values.items()}
        return [found["mvllm:mm_cache_hits_total"], found["mvllm:encoder_cache_hits_total"]]

    new = []
    for text, salt in (("p", "a"), ("q", "a"), ("r", "b"), ("s", None)):
        before = hits()
        salted = {} if salt is None else {"cache_salt": salt}
        request = chat(text_part(text), image_part(picture("purple")), **salted)
        assert content(client.post("/v1/chat/completions", json=request))
        new.append([now - then for now, then in zip(hits(), before, strict=True)])
    assert new == [[0, 0], [1, 1], [0, 0], [0, 0]]
