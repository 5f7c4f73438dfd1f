"""What clients of other engines send and read: bodies without a JSON header, integral floats, HEAD, tools without a
type, and fields that are done, refused by name, or harmless."""

from __future__ import annotations

import base64
import json
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import msgspec
import numpy as np
import pytest

from mvllm.engine.frontend.pooling_outputs import PoolingOutput, PoolingRequestOutput
from mvllm.entrypoints.openai import protocol
from mvllm.entrypoints.openai.client_request import (
    ForeignGenerationFields,
    ForeignPairFields,
    ForeignPoolingFields,
)
from mvllm.entrypoints.openai.common.logprobs import chat_logprobs
from mvllm.entrypoints.openai.common.request_body import BodyDecoder
from mvllm.entrypoints.openai.common.tokenizer_pool import TokenizerPool
from mvllm.entrypoints.openai.pooling.embeddings import _encode_values
from mvllm.entrypoints.openai.protocol import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from mvllm.entrypoints.openai.unsupported_fields import reject_unsupported_fields, unsupported_fields
from mvllm.errors import RequestError
from tests.unit.entrypoints.builders import save_model_folder
from tests.unit.entrypoints.scripted_server import TEMPLATE, Server

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello."}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    COMPLETION: {"prompt": "Hello."},
    "/tokenize": {"prompt": "Hello."},
}
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_folder(tmp_path_factory.mktemp("model"), TEMPLATE)


class TestMediaTypes:
    """`curl -d` sends JSON as a form."""

    def test_programs_may_send_json_without_its_header(self, folder: str) -> None:
        requests = [
            {"url": path, "content": json.dumps(body), "headers": headers}
            for path, body in BODIES.items()
            for headers in (
                {"Content-Type": "application/x-www-form-urlencoded"},
                {"Content-Type": "text/plain; charset=utf-8"},
                {},
                {"Content-Type": "text/plain", "Origin": "http://x", "Sec-Fetch-Site": "same-origin"},
            )
        ]
        answers = Server(folder, "Hello you.").send(*requests)
        assert [answer.status_code for answer in answers] == [200] * len(requests), answers[0].text

    @pytest.mark.parametrize(
        "headers",
        [{"Origin": "http://y"}, {"Origin": "http://x.y"}, {"Origin": "null"}, {"Sec-Fetch-Site": "same-site"}],
    )
    def test_pages_of_other_sites_may_not(self, folder: str, headers: dict[str, str]) -> None:
        """Their browser would send it without asking this server first."""
        server = Server(folder, "Hello you.")
        for kind in ("application/x-www-form-urlencoded", "text/plain", ""):
            sent = {**headers, **({"Content-Type": kind} if kind else {})}
            [answer] = server.send({"url": CHAT, "content": json.dumps(BODIES[CHAT]), "headers": sent})
            assert answer.status_code == 415 and server.core.prompts == []
        [answer] = server.send({"url": CHAT, "json": BODIES[CHAT], "headers": headers})
        assert answer.status_code == 200  # a browser asks before it sends this

    def test_other_types_and_forms_are_refused(self, folder: str) -> None:
        bad = [
            {"url": CHAT, "content": json.dumps(BODIES[CHAT]), "headers": {"Content-Type": "multipart/form-data"}},
            {"url": CHAT, "data": {"model": "m"}},
            {"url": CHAT, "content": ""},
        ]
        assert [answer.status_code for answer in Server(folder, "x").send(*bad)] == [415] * 3


def integer_fields(kind: Any) -> list[str]:
    """The fields that take an integer and no float."""
    found = []
    for field in msgspec.structs.fields(kind):
        kinds = get_args(field.type) if get_origin(field.type) in (Union, types.UnionType) else (field.type,)
        if int in kinds and float not in kinds:
            found.append(field.encode_name)
    return found


class TestIntegralFloats:
    """Clients in languages without integers send 4.0."""

    @pytest.mark.parametrize(
        "kind", [kind for kind in vars(protocol).values() if hasattr(kind, "EXAMPLE") and integer_fields(kind)]
    )
    def test_they_are_integers_in_every_integer_field_of_every_body(self, kind: type[msgspec.Struct]) -> None:
        decoder = BodyDecoder(kind)
        for name in integer_fields(kind):
            value = getattr(decoder.decode(b'{"%s": 4.0}' % name.encode()), name)
            assert value == 4 and type(value) is int, name
            with pytest.raises(Exception, match=f"{name} must be an integer.*, found a decimal number"):
                decoder.decode(b'{"%s": 4.5}' % name.encode())

    def test_in_lists_and_nested_fields_of_each_api(self, folder: str) -> None:
        server = Server(folder, "Hello you.")
        answers = server.exchange(
            ("POST", CHAT, {**BODIES[CHAT], "max_tokens": 4.0, "top_k": 3.0, "stop_token_ids": [7.0]}),
            ("POST", COMPLETION, {"prompt": [[1.0, 2.0], [3.0]], "max_tokens": 4.0}),
            ("POST", "/detokenize", {"tokens": [1.0, 2.0]}),
        )
        assert [answer.status_code for answer in answers] == [200] * 3, [answer.text for answer in answers]
        assert [request.sampling_params.max_tokens for request in server.core.requests] == [4] * 3
        assert server.core.requests[1].prompt_token_ids == [1, 2] and server.core.requests[0].sampling_params.top_k == 3
        refused = server.exchange(("POST", COMPLETION, {"prompt": [1.5]}), ("POST", CHAT, {**BODIES[CHAT], "n": 1e300}))
        assert [answer.status_code for answer in refused] == [400, 400]


def test_head_is_get_without_its_body_on_every_route(folder: str) -> None:
    server = Server(folder, "Hello you.")
    [document] = server.exchange(("GET", "/openapi.json", None))
    paths = [path for path, operations in document.json()["paths"].items() if "get" in operations and "{" not in path]
    assert {"/v1/models", "/health", "/metrics", "/version", "/tokenizer_info"} <= set(paths)
    urls = [*paths, "/v1/models/m", "/docs", "/"]
    answers = server.send(*({"method": method, "url": url} for url in urls for method in ("GET", "HEAD")))
    for get, head in zip(answers[::2], answers[1::2], strict=True):
        assert head.status_code == get.status_code and head.content == b"", head.url
        assert head.headers["content-type"] == get.headers["content-type"]
    [wrong] = server.send({"method": "HEAD", "url": COMPLETION})
    assert wrong.status_code == 405


def test_the_description_of_the_api_has_queries_bodies_errors_and_keys(folder: str) -> None:
    [answer] = Server(folder, "Hello you.").exchange(("GET", "/openapi.json", None))
    document = answer.json()
    sleep = document["paths"]["/sleep"]["post"]
    [level] = sleep["parameters"]
    assert (level["name"], level["in"], level["required"]) == ("level", "query", False)
    assert level["schema"] == {"type": "integer", "default": 1} and sleep["tags"] == ["admin"]
    chat = document["paths"][CHAT]["post"]
    content = chat["requestBody"]["content"]["application/json"]
    assert content["schema"]["$ref"].removeprefix("#/components/schemas/") in document["components"]["schemas"]
    assert chat["responses"]["default"]["content"] and chat["summary"] and chat["description"]
    assert document["security"] == [{"key": []}] and document["paths"]["/health/ready"]["get"]["security"] == []
    operations = [each["operationId"] for methods in document["paths"].values() for each in methods.values()]
    assert len(set(operations)) == len(operations) > 30


def test_an_empty_list_of_inputs_has_an_empty_list_of_vectors(folder: str) -> None:
    answers = Server(folder, "x").exchange(
        ("POST", "/v1/embeddings", {"input": []}),
        ("POST", "/pooling", {"input": []}),
    )
    for answer in answers:
        assert answer.json()["data"] == [] and answer.json()["usage"]["prompt_tokens"] == 0


class TestMessages:
    def test_parts_of_every_kind_of_text(self, folder: str) -> None:
        kinds = ("text", "input_text", "output_text")
        parts = [*({"type": kind, "text": kind} for kind in kinds), {"type": "refusal", "refusal": "refusal"}, "plain"]
        server = Server(folder, "Hello you.")
        messages = [{"role": "user", "content": parts}]
        answers = server.exchange(
            ("POST", CHAT, {"messages": messages}),
            ("POST", CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        )
        assert [answer.status_code for answer in answers] == [200, 400], answers[0].text
        joined = "\n".join([*kinds, "refusal", "plain"])
        assert joined in server.core.prompts[0]

    def test_tools_without_a_type_are_functions(self, folder: str) -> None:
        typed = tmp_template(folder)
        server = Server(typed, CALL)
        answers = server.exchange(
            ("POST", CHAT, {"messages": MESSAGES, "tools": [{"function": FUNCTION}]}),
            ("POST", CHAT, {"messages": MESSAGES, "tools": [{"type": None, "function": FUNCTION}]}),
            ("POST", CHAT, {"messages": MESSAGES, "tools": [{"function": FUNCTION}], "stream": True}),
            ("POST", "/tokenize", {"messages": MESSAGES, "tools": [{"function": FUNCTION}]}),
        )
        assert [answer.status_code for answer in answers] == [200] * 4, [answer.text for answer in answers]
        assert answers[0].json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
        assert len(set(server.core.prompts)) == 1 and server.core.prompts[0].endswith("function ")
        assert answers[3].json()["count"] == answers[0].json()["usage"]["prompt_tokens"]


def tmp_template(folder: str) -> str:
    """A model whose template writes the types of tools."""
    path = Path(folder) / "typed"
    path.mkdir(exist_ok=True)
    return save_model_folder(path, TEMPLATE.replace("t['function']['name']", "t['type']"))


def test_special_tokens_are_added_to_the_templates_if_a_chat_asks_for_them(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    encode = TokenizerPool.encode_sync

    def record(self: TokenizerPool, text: str, *, add_special_tokens: bool, truncated: bool = False) -> list[int]:
        asked.append(add_special_tokens)
        return encode(self, text, add_special_tokens=add_special_tokens, truncated=truncated)

    monkeypatch.setattr(TokenizerPool, "encode_sync", record)
    for more in ({}, {"add_special_tokens": False}, {"add_special_tokens": True}):
        Server(folder, "x").exchange(
            ("POST", CHAT, {"messages": MESSAGES, **more}), ("POST", "/tokenize", {"messages": MESSAGES, **more})
        )
    assert asked == [False] * 4 + [True] * 2


# Fields of other engines: done (None), refused with the value, or harmless with it.

REFUSED_IN_GENERATION: dict[str, Any] = {
    "logprob_token_ids": [1],
    "watermarking": True,
    "repetition_detection": {"max_pattern_size": 3},
    "ec_transfer_params": {"a": 1},
    "media_io_kwargs": {"video": {"num_frames": 3}},
    "guided_whitespace_pattern": "x",
    "t_max_predict_ms": 50,
    "lora": [{"id": 0, "scale": 0.5}],
    "n_predict": 5,
    "n_probs": 2,
    "samplers": ["top_k"],
    "repeat_penalty": 1.1,
    "typical_p": 0.5,
    "tfs_z": 0.5,
    "top_a": 0.1,
    "top_n_sigma": 1.0,
    "mirostat": 2,
    "dynatemp_range": 0.5,
    "xtc_probability": 0.5,
    "dry_multiplier": 0.8,
    "smoothing_factor": 0.2,
    "reasoning_format": "none",
    "no_stop_trim": True,
    "stop_regex": "a+",
    "lora_path": "x",
    "custom_logit_processor": "x",
    "return_hidden_states": True,
    "separate_reasoning": False,
    "web_search_options": {},
    "verbosity": "low",
}
REFUSED_IN_POOLING: dict[str, Any] = {
    "padding": "max_length",
    "media_io_kwargs": {"image": {}, "x": 1},
    "data": {"x": 1},
    "softmax": False,
    "activation": False,
}
REFUSED_IN_PAIRS: dict[str, Any] = {
    **REFUSED_IN_POOLING,
    "mm_processor_kwargs": {"x": 1},
    "chat_template": "x",
    "instruct": "x",
    "instruction": "x",
    "rank_fields": ["x"],
    "max_chunks_per_doc": 3,
}
HARMLESS_IN_GENERATION: dict[str, Any] = {
    **{name: how.neutral[0] for name, how in unsupported_fields(ForeignGenerationFields).items() if how.neutral},
    "no_stop_trim": False,
    "return_hidden_states": False,
    "samplers": [],
    "logits_processors": 0,
    "stream_interval": 4,
    "session_id": "s",
    "return_token_offsets": True,
    "return_mm_kwargs": False,
    "cache_prompt": True,
    "id_slot": 3,
    "timings_per_token": True,
    "truncation_side": "right",
}


class TestFieldsOfOtherEngines:
    def test_every_known_field_is_in_this_table(self) -> None:
        tested = [REFUSED_IN_GENERATION, REFUSED_IN_POOLING, REFUSED_IN_PAIRS]
        kinds = [ForeignGenerationFields, ForeignPoolingFields, ForeignPairFields]
        for kind, refused in zip(kinds, tested, strict=True):
            assert set(unsupported_fields(kind)) == set(refused)

    @pytest.mark.parametrize("path", [CHAT, COMPLETION])
    def test_in_generation(self, folder: str, path: str) -> None:
        server, body = Server(folder, "Hello you."), BODIES[path]
        refused = server.exchange(
            *(("POST", path, {**body, name: value}) for name, value in REFUSED_IN_GENERATION.items())
        )
        for answer, name in zip(refused, REFUSED_IN_GENERATION, strict=True):
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == name and "not supported" in error["message"], name
        harmless = server.exchange(
            *(("POST", path, {**body, name: value}) for name, value in HARMLESS_IN_GENERATION.items()),
            *(("POST", path, {**body, name: None}) for name in REFUSED_IN_GENERATION),
        )
        assert {answer.status_code for answer in harmless} == {200}

    @pytest.mark.parametrize(
        "kind", [EmbeddingRequest, PoolingRequest, ClassificationRequest, ScoreRequest, RerankRequest]
    )
    def test_in_pooling(self, kind: type[msgspec.Struct]) -> None:
        refused = REFUSED_IN_PAIRS if kind in (ScoreRequest, RerankRequest) else REFUSED_IN_POOLING
        for name, value in refused.items():
            with pytest.raises(RequestError) as caught:
                reject_unsupported_fields(kind(**{name: value}))
            assert caught.value.parameter == name
        for fields in ({"truncation_side": "left", "truncate_prompt_tokens": 3}, {"truncation_side": "both"}):
            with pytest.raises(RequestError, match="truncation_side"):
                reject_unsupported_fields(kind(**fields))
        for fields in (
            {"truncation_side": "right", "truncate_prompt_tokens": 3},
            {"truncation_side": "left"},
            {"padding": "do_not_pad"},
        ):
            reject_unsupported_fields(kind(**fields))

    def test_prompts_keep_their_last_tokens(self, folder: str) -> None:
        server = Server(folder, "Hello you.")
        left, right = (
            server.post({**BODIES[COMPLETION], "truncate_prompt_tokens": 2, "truncation_side": side}, COMPLETION)
            for side in ("left", "right")
        )
        assert left.status_code == 200 and len(server.core.requests[0].prompt_token_ids) == 2
        assert right.status_code == 400 and right.json()["error"]["param"] == "truncation_side"

    @pytest.mark.parametrize(
        ("field", "value", "form"),
        [
            ("json_schema", {"type": "object"}, "json"),
            ("json_schema", '{"type": "object"}', "json"),
            ("grammar", 'root ::= "yes" | "no"', "grammar"),
            ("ebnf", 'root ::= "yes" | "no"', "grammar"),
            ("regex", "yes|no", "regex"),
        ],
    )
    def test_constraints_under_other_names(self, folder: str, field: str, value: Any, form: str) -> None:
        server = Server(folder, "yes")
        for path in (CHAT, COMPLETION):
            assert server.post({**BODIES[path], field: value}, path).status_code == 200
            constraint = server.core.requests[-1].sampling_params.structured_outputs
            assert constraint.form == form
            for bad in ({field: 5}, {field: value, "response_format": {"type": "json_object"}}):
                assert server.post({**BODIES[path], **bad}, path).status_code == 400
            assert server.post({**BODIES[path], field: "" if field != "json_schema" else None}, path).status_code == 200

    def test_stream_options_need_a_stream(self, folder: str) -> None:
        server = Server(folder, "Hello you.")
        for path in (CHAT, COMPLETION):
            for more in ({}, {"stream": False}):
                error = server.post({**BODIES[path], **more, "stream_options": {"include_usage": True}}, path)
                assert error.status_code == 400 and error.json()["error"]["param"] == "stream_options"
            assert server.post({**BODIES[path], "stream_options": None}, path).status_code == 200


def test_vectors_in_base64_have_the_type_and_byte_order_that_were_asked_for() -> None:
    vector = np.array([1.0, -0.1, 3e-5, 65504.0], np.float32)
    output = PoolingRequestOutput("r", PoolingOutput(vector), [1], True)

    def decoded(kind: str, **fields: Any) -> np.ndarray:
        encoded = _encode_values(output, EmbeddingRequest(encoding_format="base64", **fields))
        return np.frombuffer(base64.b64decode(encoded), kind)

    assert (decoded("<f4") == vector).all() and (decoded("<f4", endianness="native") == vector).all()
    assert (decoded(">f4", endianness="big", embed_dtype="float32") == vector).all()
    assert (decoded("<f2", embed_dtype="float16") == vector.astype(np.float16)).all()
    assert (decoded(">f2", embed_dtype="float16", endianness="big") == vector.astype(np.float16)).all()
    bits = decoded(">u2", embed_dtype="bfloat16", endianness="big").astype(np.uint32) << 16
    assert np.allclose(bits.view(np.float32), vector, rtol=2**-8)
    assert bits[1] >> 16 == 0xBDCD  # -0.1 rounds to the nearest
    assert _encode_values(output, EmbeddingRequest(embed_dtype="float16")) == vector.tolist()


@pytest.mark.parametrize("field", [{"embed_dtype": "fp8_e4m3"}, {"endianness": "middle"}, {"encoding_format": "bytes"}])
def test_other_types_of_vectors_are_refused(folder: str, field: dict[str, str]) -> None:
    for path in ("/v1/embeddings", "/pooling"):
        error = Server(folder, "x").post({"input": "x", **field}, path)
        assert error.status_code == 400 and error.json()["error"]["param"] == next(iter(field))


class TestWhatClientsRead:
    def test_fields_without_a_value_are_null(self, folder: str) -> None:
        server = Server(folder, "Hello you.", tool_parser=None, reasoning_parser=None)
        chat, chat_ids, completion, completion_ids = (
            server.post({**BODIES[path], "return_token_ids": asks}, path).json()
            for path in (CHAT, COMPLETION)
            for asks in (None, True)
        )
        for answer in (chat, completion):
            assert {answer[name] for name in ("service_tier", "system_fingerprint", "kv_transfer_params")} == {None}
        choice = completion["choices"][0]
        for target, names in (
            (chat, ("prompt_logprobs", "prompt_token_ids")),
            (chat["choices"][0], ("token_ids",)),
            (choice, ("prompt_logprobs", "prompt_token_ids", "token_ids")),
        ):
            assert all(name in target and target[name] is None for name in names)
        assert chat_ids["prompt_token_ids"] and chat_ids["choices"][0]["token_ids"]
        assert completion_ids["choices"][0]["prompt_token_ids"] and completion_ids["choices"][0]["token_ids"]

    def test_logprobs_of_a_chat_have_a_refusal(self) -> None:
        assert chat_logprobs(None, [], [], 0) == {"content": [], "refusal": None}  # type: ignore[arg-type]

    @pytest.mark.parametrize("n", [1, 2])
    @pytest.mark.parametrize("text", ["Hello you.", "<think>Hm.</think>Hello you."])
    def test_every_chunk_has_the_usage_if_it_is_continuous(self, folder: str, text: str, n: int) -> None:
        options = {"stream": True, "n": n, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        for path in (CHAT, COMPLETION):
            answer = Server(folder, text).post({**BODIES[path], **options}, path)
            chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            usages = [chunk["usage"] for chunk in chunks]
            assert all(usage["prompt_tokens"] > 0 for usage in usages)
            numbers = [usage["completion_tokens"] for usage in usages]
            assert numbers[-1] == numbers[-2] > 2 and numbers == sorted(numbers)
            if path == CHAT:
                first = chunks[0]["choices"][0]
                assert first["delta"]["role"] == "assistant" and (numbers[0] == 0 or n > 1)
            assert chunks[-2]["choices"][0]["finish_reason"] == "stop"

    def test_the_first_chunk_of_a_chat_has_the_token_ids_of_the_prompt(self, folder: str) -> None:
        answer = Server(folder, "Hello you.").post({**BODIES[CHAT], "stream": True, "return_token_ids": True})
        first, second, *_ = (json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {"))
        assert first["prompt_token_ids"] == first["choices"][0]["prompt_token_ids"] != []
        assert "prompt_token_ids" not in second

    def test_the_text_of_the_prompt_is_reported_if_a_chat_asks_for_it(self, folder: str) -> None:
        server = Server(folder, "Hello you.")
        whole, streamed, plain = server.exchange(
            ("POST", CHAT, {**BODIES[CHAT], "return_prompt_text": True}),
            ("POST", CHAT, {**BODIES[CHAT], "return_prompt_text": True, "stream": True}),
            ("POST", CHAT, BODIES[CHAT]),
        )
        chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        assert whole.json()["prompt_text"] == chunks[0]["prompt_text"] and "Hello." in chunks[0]["prompt_text"]
        assert not any("prompt_text" in each for each in (*chunks[1:], plain.json()))

    def test_tokenizer_info_is_the_configuration_of_the_tokenizer(self, folder: str) -> None:
        [answer] = Server(folder, "x").exchange(("GET", "/tokenizer_info", None))
        assert answer.json()["chat_template"] == TEMPLATE and isinstance(answer.json()["tokenizer_class"], str)
