"""Examples of docs/reference/http: one request and its response for each route of the server.

python -m tests.unit.docs.http_examples              writes the examples of http_examples.json into the pages
python -m tests.unit.docs.http_examples --record     sends all requests to servers that it starts, and saves what they
                                                     answer

The servers have the demo model, and for what it cannot do tiny models with random weights: a classifier, a Whisper and
a Janus. Ids, times, hashes and paths are replaced, so that a record changes only where a response does.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import re
import shutil
import sys
import tempfile
import threading
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.helpers.response_schemas import api_document, installed_checker

FILE = Path(__file__).with_name("http_examples.json")
PAGES = Path(__file__).parents[3] / "docs" / "reference" / "http"
ADDRESS = "http://127.0.0.1:8000"
ADMIN_KEY = "admin-key"
WIDTH = 100
SAME = {
    "POST /score": "POST /v1/score",
    "POST /rerank": "POST /v1/rerank",
    "POST /v2/rerank": "POST /v1/rerank",
    "GET /ping": "GET /health/live",
    "POST /ping": "GET /health/live",
    "GET /health/ready": "GET /health/live",
}
"""Routes with the request and the response of another one, which the pages do not repeat."""

NOW = 1767225600
MAX_ITEMS = 3
MAX_TEXT = 120


def routes() -> list[str]:
    """Every route that `/openapi.json` describes, as method and path."""
    paths = api_document()["paths"]
    return sorted(f"{method.upper()} {path}" for path, operations in paths.items() for method in operations)


# ------------------------------------------------------------------------------------------------------------ rendering


def example_names() -> list[tuple[Path, str]]:
    """The pages and the names of the examples that have a place in them."""
    pages = sorted(PAGES.glob("*.md"))
    return [(page, name) for page in pages for name in re.findall(r"<!-- example: (.+) -->", page.read_text("utf-8"))]


def with_examples(text: str, records: dict[str, Any]) -> str:
    """A page with its examples."""

    def replace(match: re.Match[str]) -> str:
        return f"<!-- example: {match[1]} -->\n{rendered(records[match[1]])}\n<!-- end of example -->"

    return re.sub(r"<!-- example: ([^\n]+) -->\n.*?<!-- end of example -->", replace, text, flags=re.DOTALL)


def rendered(record: dict[str, Any]) -> str:
    """A request as a command of curl, and what it prints."""
    method, url = record["method"], f"{ADDRESS}{record['path']}"
    words = [f"curl {url}" if "&" not in url and "?" not in url else f"curl '{url}'"]
    if method != ("POST" if "body" in record or "form" in record else "GET"):
        words.append(f"-X {method}")
    words += [f"-H '{name}: {value}'" for name, value in record.get("headers", {}).items()]
    words += [f"-F {name}={value}" for name, value in record.get("form", {}).items()]
    if "body" in record:
        words += ["-H 'Content-Type: application/json'", f"-d '{json.dumps(record['body'], ensure_ascii=False)}'"]
    command = " ".join(words)
    if len(command) > WIDTH:
        command = " \\\n    ".join([" ".join(words[:-1]), words[-1]])
    if len(command.split("\n")[0]) > WIDTH:
        command = " \\\n    ".join(words)
    kind = "json" if record["media_type"] == "application/json" else "text"
    return f"```bash\n{command}\n```\n\n```{kind}\n{shown_response(record)}\n```"


def shown_response(record: dict[str, Any]) -> str:
    """The body of a response, shortened."""
    found = record["response"]
    if record["media_type"] == "application/json":
        return compact(shortened(found))
    if record["media_type"] == "text/event-stream":
        lines = [event_text(event) for event in found]
    elif record["media_type"] == "application/x-ndjson":
        lines = [json.dumps(shortened(line), ensure_ascii=False) for line in found]
    else:
        return found.rstrip()
    between = "\n\n" if record["media_type"] == "text/event-stream" else "\n"
    return between.join(lines if len(lines) <= 8 else [*lines[:4], f"… {len(lines) - 7} more", *lines[-3:]])


def event_text(event: dict[str, Any]) -> str:
    name = f"event: {event['event']}\n" if "event" in event else ""
    data = event["data"]
    return f"{name}data: {data if isinstance(data, str) else json.dumps(short_event(data), ensure_ascii=False)}"


def short_event(data: dict[str, Any]) -> dict[str, Any]:
    """An event without most fields of the objects that repeat the whole response."""
    found: dict[str, Any] = shortened(data)
    for name, value in found.items():
        if isinstance(value, dict) and len(value) > 9:
            found[name] = {**dict(list(value.items())[:4]), "…": f"{len(value) - 4} more"}
    return found


def shortened(value: Any) -> Any:
    """A value without most entries of long lists of numbers and the ends of long texts."""
    if isinstance(value, dict):
        return {name: shortened(each) for name, each in value.items()}
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else f"{value[: MAX_TEXT // 2]}… ({len(value)} characters)"
    if isinstance(value, list):
        is_long = len(value) > 2 * MAX_ITEMS
        kept = [shortened(each) for each in value[: MAX_ITEMS if is_long else None]]
        return [*kept, f"… {len(value) - MAX_ITEMS} more"] if is_long else kept
    return value


def compact(value: Any, indent: int = 0) -> str:
    """JSON with two spaces, and in one line what fits into it."""
    whole = json.dumps(value, ensure_ascii=False)
    if len(whole) + indent <= WIDTH - 10 or not isinstance(value, dict | list) or not value:
        return whole
    inner = " " * (indent + 2)
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {compact(each, indent + 2)}" for name, each in value.items()]
        return "{\n" + ",\n".join(inner + part for part in parts) + "\n" + " " * indent + "}"
    parts = [compact(each, indent + 2) for each in value]
    return "[\n" + ",\n".join(inner + part for part in parts) + "\n" + " " * indent + "]"


# ------------------------------------------------------------------------------------------------------------ recording


class Masks:
    """Replaces what differs from run to run."""

    def __init__(self, folders: dict[str, str]) -> None:
        self._folders = folders
        self._ids: dict[str, str] = {}

    def text(self, text: str) -> str:
        """A text with ids, dates and folders replaced."""
        for folder, name in sorted(self._folders.items(), key=lambda item: -len(item[0])):
            text = text.replace(folder, name)
        text = re.sub(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])", lambda match: self._id(match[0]), text)
        return re.sub(r"20\d\d-\d\d-\d\dT[\d:.]+Z", "2026-01-01T00:00:00Z", text)

    def value(self, value: Any, name: str = "") -> Any:
        """A value of JSON with what differs replaced."""
        if isinstance(value, dict):
            return {each: self.value(inner, each) for each, inner in value.items()}
        if isinstance(value, list):
            return [self.value(each, name) for each in value]
        if isinstance(value, str):
            return self.text(value)
        if name in ("created", "created_at", "completed_at") and isinstance(value, int):
            return NOW
        if isinstance(value, int) and str(value) in self._folders:  # a port
            return int(self._folders[str(value)])
        if name.endswith("_duration"):
            return 150_000_000
        if isinstance(value, float):
            return 0.0 if name.endswith("per_second") or name == "kv_cache_usage" else round(value, 4)
        return value

    def _id(self, found: str) -> str:
        return self._ids.setdefault(found, hashlib.md5(str(len(self._ids)).encode()).hexdigest())


class Recorder:
    """Sends requests to a server, and keeps requests and responses.

    Args:
        client: A client of the server.
        masks: Replaces what differs.
        records: Gets the examples, by their names.
    """

    def __init__(self, client: Any, masks: Masks, records: dict[str, Any]) -> None:
        self._client, self._masks, self._records = client, masks, records

    def __call__(
        self,
        route: str,
        body: dict[str, Any] | None = None,
        *,
        name: str = "",
        headers: dict[str, str] | None = None,
        query: str = "",
        form: dict[str, str] | None = None,
        file: bytes = b"",
        replaced: dict[str, Any] | None = None,
        **parameters: str,
    ) -> Any:
        """Sends a request, and keeps it under the route's name, or `route (name)`; returns the JSON of the response.

        Args:
            replaced: Fields of the response with other values than those received.
        """
        method, _, path = route.partition(" ")
        filled = path
        for each, value in parameters.items():
            filled = filled.replace(f"{{{each}}}", value)
        sent: dict[str, Any] = {"headers": headers or {}}
        if form is not None:
            sent |= {"data": {n: v for n, v in form.items() if n != "file"}, "files": {"file": ("a.wav", file)}}
        elif body is not None:
            sent["json"] = body
        response = self._client.request(method, filled + query, **sent)
        assert response.status_code == 200, f"{route}: {response.status_code} {response.text}"
        media_type = response.headers["content-type"].partition(";")[0]
        if "admin" in api_document()["paths"][path][method.lower()].get("tags", ()):
            headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        record: dict[str, Any] = {"method": method, "path": self._masks.text(filled + query)}
        for key, value in (("headers", headers), ("body", body), ("form", form)):
            if value is not None:
                record[key] = self._masks.value(value)
        found = decoded(media_type, response.text)
        record |= {"media_type": media_type, "response": self._masks.value(found)}
        if replaced:
            record["response"] |= replaced
        key = f"{route} ({name})" if name else route
        assert key not in self._records, key
        self._records[key] = record
        return found


def decoded(media_type: str, text: str) -> Any:
    """A body: a value of JSON, the events or lines of a stream, or a text."""
    if media_type == "application/json":
        return json.loads(text)
    if media_type == "application/x-ndjson":
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    if media_type == "text/event-stream":
        return [decoded_event(event) for event in text.split("\n\n") if event.strip(": \n")]
    return "\n".join([*(line for line in text.splitlines() if "mvllm:num_requests_" in line), "…"])


def decoded_event(text: str) -> dict[str, Any]:
    fields = dict(line.split(": ", 1) for line in text.splitlines())
    return {**fields, "data": json.loads(fields["data"]) if fields["data"].startswith("{") else fields["data"]}


def values_of(record: dict[str, Any]) -> list[Any]:
    """The values of JSON in a response."""
    found = record["response"]
    if record["media_type"] == "text/event-stream":
        return [event["data"] for event in found if not isinstance(event["data"], str)]
    return found if record["media_type"] == "application/x-ndjson" else [found]


QUESTION = {"role": "user", "content": "What is the capital of France?"}
GREEDY = {"temperature": 0, "max_tokens": 16}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def record_demo(record: Recorder, folders: dict[str, str], port: int) -> None:
    """The routes that the demo model can answer."""
    where = {name: folder for folder, name in folders.items()}
    chat = {"messages": [QUESTION], **GREEDY}
    record("POST /v1/chat/completions", chat)
    record("POST /v1/chat/completions", {**chat, "stream": True}, name="streamed")
    tools = {"tools": [WEATHER], "tool_choice": "required", "temperature": 0, "max_tokens": 64}
    asked = {"role": "user", "content": "What is the weather in Paris?"}
    record("POST /v1/chat/completions", {"messages": [asked], **tools}, name="with a tool")
    record("POST /v1/completions", {"prompt": "Once upon a time", **GREEDY, "logprobs": 1})
    record("POST /v1/completions", {"prompt": "Once upon a time", **GREEDY, "stream": True}, name="streamed")

    stored = record("POST /v1/chat/completions", {**chat, "store": True, "metadata": {"a": "b"}}, name="stored")
    path = {"completion_id": stored["id"]}
    record("GET /v1/chat/completions", query="?limit=2")
    record("GET /v1/chat/completions/{completion_id}", **path)
    record("POST /v1/chat/completions/{completion_id}", {"metadata": {"topic": "rivers"}}, **path)
    record("GET /v1/chat/completions/{completion_id}/messages", **path)
    record("DELETE /v1/chat/completions/{completion_id}", **path)

    text = "The capital of France is Paris."
    pair = {"text_1": "What is the capital of France?", "text_2": [text, "Rome is in Italy."]}
    ranked = {"query": "What is the capital of France?", "documents": [text, "Rome is in Italy."], "top_n": 1}
    record("POST /v1/embeddings", {"input": [text]})
    record("POST /pooling", {"input": "Paris", "task": "token_embed"})
    for route in ("POST /v1/score", "POST /score"):
        record(route, pair)
    for route in ("POST /v1/rerank", "POST /rerank", "POST /v2/rerank"):
        record(route, ranked)

    asked_response = {"input": "What is the capital of France?", "temperature": 0, "max_output_tokens": 16}
    response = record("POST /v1/responses", asked_response)
    record("POST /v1/responses", {**asked_response, "stream": True}, name="streamed")
    path = {"response_id": response["id"]}
    record("POST /v1/responses/input_tokens", {"input": "What is the capital of France?"})
    record("GET /v1/responses/{response_id}", **path)
    record("GET /v1/responses/{response_id}/input_items", **path)
    record("DELETE /v1/responses/{response_id}", **path)
    background = {"input": "Tell me a story.", "background": True, "temperature": 0, "max_output_tokens": 8}
    waiting = record("POST /v1/responses", background, name="in the background")
    record("POST /v1/responses/{response_id}/cancel", response_id=waiting["id"])
    conversation = record("POST /v1/conversations", {"metadata": {"topic": "cities"}})
    path = {"conversation_id": conversation["id"]}
    items = record("POST /v1/conversations/{conversation_id}/items", {"items": [QUESTION]}, **path)
    item = {**path, "item_id": items["data"][0]["id"]}
    record("GET /v1/conversations/{conversation_id}", **path)
    record("POST /v1/conversations/{conversation_id}", {"metadata": {"topic": "rivers"}}, **path)
    record("GET /v1/conversations/{conversation_id}/items", **path)
    record("GET /v1/conversations/{conversation_id}/items/{item_id}", **item)
    record("DELETE /v1/conversations/{conversation_id}/items/{item_id}", **item)
    record("DELETE /v1/conversations/{conversation_id}", **path)

    message = {"messages": [QUESTION], **GREEDY}
    record("POST /v1/messages", message)
    record("POST /v1/messages", {**message, "stream": True}, name="streamed")
    record("POST /v1/messages/count_tokens", {"messages": [QUESTION]})
    options = {"model": "demo", "options": {"temperature": 0, "num_predict": 16}}
    record("POST /api/chat", {"messages": [QUESTION], **options, "stream": False})
    record("POST /api/chat", {"messages": [QUESTION], **options}, name="streamed")
    record("POST /api/generate", {"prompt": "What is the capital of France?", **options, "stream": False})
    record("POST /api/embed", {"model": "demo", "input": [text]})
    record("POST /api/embeddings", {"model": "demo", "prompt": text})
    record("POST /api/show", {"model": "demo"})
    for path_ in ("tags", "ps", "version"):
        record(f"GET /api/{path_}")

    record("GET /v1/models")
    record("GET /v1/models", headers={"anthropic-version": "2023-06-01"}, name="Anthropic")
    record("GET /v1/models/{model_id}", model_id="demo")
    record("POST /tokenize", {"prompt": text, "return_token_strs": True})
    record("POST /detokenize", {"tokens": [9, 5, 12]})
    record("GET /tokenizer_info")
    for route in ("GET /health", "GET /health/live", "GET /health/ready", "GET /ping", "POST /ping"):
        record(route)
    for route in ("GET /version", "GET /load", "GET /metrics", "GET /server_info"):
        record(route)

    record("POST /v1/load_lora_adapter", {"lora_name": "poems", "lora_path": where["adapters/poems"]})
    record("POST /v1/update_lora_adapter", {"lora_name": "poems"})
    record("POST /v1/unload_lora_adapter", {"lora_name": "poems"})
    record("POST /reset_prefix_cache")
    record("POST /reset_mm_cache")
    record("POST /pause", query="?mode=keep")
    record("GET /is_paused")
    record("POST /resume")
    record("POST /sleep", query="?level=1")
    record("GET /is_sleeping")
    record("POST /wake_up")
    record("GET /weight_info")
    record("POST /start_weight_update")
    record("POST /update_weights", {"update_info": {"path": where["checkpoints/step-100"]}})
    record("POST /finish_weight_update", {"weight_version": 100})
    record("POST /start_weight_update", name="again")
    record("POST /abandon_weight_update")
    record("POST /collective_rpc", {"method": "device_name"})
    record_weight_transfer(record, port)


def record_weight_transfer(record: Recorder, port: int) -> None:
    """The server joins the group of a trainer, which is a thread here."""
    from mvllm import WeightTransferGroup, WeightTransferInfo

    info = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
    trainer = threading.Thread(target=lambda: WeightTransferGroup(WeightTransferInfo(**info)))
    trainer.start()
    record("POST /init_weight_transfer_engine", {"init_info": info})
    trainer.join()


class WorkerMethods:
    """`--worker-extension-cls` of the recorded server."""

    def device_name(self) -> str:
        return "a device"


def record_all() -> dict[str, Any]:
    """Starts the servers, one after the other, and records every route."""
    from mvllm.demo import demo_model_path
    from tests.helpers.encoder_zoo import checkpoint
    from tests.helpers.lora_adapters import write_adapter
    from tests.helpers.ports import free_port
    from tests.helpers.server import SMALL, ServerProcess
    from tests.helpers.whisper import make_whisper

    records: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        adapter = write_adapter(folder / "adapter", demo_model_path(), size=0.1)
        weights = folder / "weights"
        shutil.copytree(demo_model_path(), weights)
        port = free_port()
        folders = {
            str(adapter): "adapters/poems",
            str(weights): "checkpoints/step-100",
            str(demo_model_path()): "demo",
            str(port): "29600",
        }
        masks = Masks(folders)
        extension = f"{__name__ if __name__ != '__main__' else 'tests.unit.docs.http_examples'}.WorkerMethods"
        options = ("--enable-lora", "--worker-extension-cls", extension, "--admin-api-key", ADMIN_KEY)

        def serve(model: str, *more: str) -> ServerProcess:
            return ServerProcess(folder, model, "--port", "0", *SMALL, *more, PYTHONPATH=str(Path.cwd()))

        key = {"Authorization": f"Bearer {ADMIN_KEY}"}
        with serve("demo", *options) as server, server.wait_ready().client(headers=key) as client:
            record_demo(Recorder(client, masks, records), folders, port)
        classifier = checkpoint("BertForSequenceClassification", labels=2, tokenizer=True)
        with serve(str(classifier), "--served-model-name", "classifier") as server:
            with server.wait_ready().client() as client:
                Recorder(client, masks, records)("POST /classify", {"input": ["a text"]})
        whisper = make_whisper("whisper", folder / "whisper")
        with serve(str(whisper), "--served-model-name", "whisper-tiny") as server:
            with server.wait_ready().client() as client:
                record = Recorder(client, masks, records)
                form = {"file": "@speech.wav", "model": "whisper-tiny"}
                for path in ("transcriptions", "translations"):
                    record(f"POST /v1/audio/{path}", form=form, file=sound(), replaced={"text": "…"})
        zoo = importlib.import_module("plugins.image-generation.tests.image_zoo")
        janus = zoo.make_janus(folder / "janus", grid=6)
        with serve(str(janus), "--served-model-name", "Janus-Pro-1B", "--max-model-len", "256") as server:
            with server.wait_ready().client() as client:
                record = Recorder(client, masks, records)
                record("POST /v1/images/generations", {"prompt": "A dog that runs in the rain.", "n": 1, "seed": 1})
    return records


def sound() -> bytes:
    """A second of silence, as a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(16000)
        audio.writeframes(bytes(32000))
    return file.getvalue()


def check(records: dict[str, Any]) -> None:
    """Compares the responses with the description of the API.

    Raises:
        AssertionError: One is not as described.
    """
    for record in records.values():
        body = json.dumps(record["response"]) if record["media_type"] == "application/json" else ""
        if record["media_type"] in ("text/event-stream", "application/x-ndjson"):
            prefix = "data: " if record["media_type"] == "text/event-stream" else ""
            body = "\n\n".join(prefix + json.dumps(value) for value in values_of(record))
        path = record["path"].partition("?")[0]
        is_anthropic = "anthropic-version" in record.get("headers", {})
        arguments = (record["method"], path, 200, record["media_type"], body.encode())
        assert installed_checker().check(*arguments, anthropic=is_anthropic), f"{path} is not known"


def keys_of(value: Any) -> Any:
    """The names of a value's fields, for comparisons of two records."""
    if isinstance(value, dict):
        return {name: keys_of(each) for name, each in value.items()}
    return [keys_of(value[0])] if isinstance(value, list) and value else None


def pages() -> Iterator[tuple[Path, str]]:
    """Every page with the examples of the file."""
    records = json.loads(FILE.read_text("utf-8"))
    for path in sorted(PAGES.glob("*.md")):
        yield path, with_examples(path.read_text("utf-8"), records)


if __name__ == "__main__":
    if "--record" in sys.argv:
        found = record_all()
        FILE.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    for page, text in pages():
        page.write_text(text, encoding="utf-8")
