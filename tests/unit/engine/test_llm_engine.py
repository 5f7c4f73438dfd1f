"""LLMEngine with an engine core that needs no model."""

from __future__ import annotations

import pytest

from mvllm import ConfigError, RequestError, SamplingParams
from mvllm.engine.llm_engine import LLMEngine
from mvllm.errors import EngineDeadError
from mvllm.messages.sampling_params import RequestOutputKind
from tests.unit.engine.builders import FakeClient, make_config
from tests.unit.engine.tokenizers import make_tokenizer, save_tokenizer

ANSWER = make_tokenizer().encode("The cat sat on the mat.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return str(folder)


@pytest.fixture
def client(folder):
    return FakeClient(make_config(tokenizer=folder), lambda request: ANSWER)


@pytest.fixture
def engine(client):
    return LLMEngine(client.config, client)


FINAL = SamplingParams(max_tokens=None, output_kind=RequestOutputKind.FINAL_ONLY)


def drain(engine):
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_a_request_is_answered(engine):
    engine.add_request("a", "Hello", FINAL)
    (output,) = drain(engine)
    assert (output.request_id, output.prompt, output.outputs[0].text) == ("a", "Hello", "The cat sat on the mat.")


def test_a_stop_string_frees_the_core(engine, client):
    engine.add_request("a", "Hello", SamplingParams(max_tokens=None, stop="sat"))
    drain(engine)
    assert not client.has_requests()


def test_an_id_in_use_is_refused(engine, client):
    engine.add_request("a", "Hello", FINAL)
    with pytest.raises(RequestError, match="'a' is in use") as caught:
        engine.add_request("a", "Hello", FINAL)
    assert caught.value.parameter == "request_id"
    assert len(client.requests) == 1


def test_an_id_may_be_used_again_afterwards(engine, client):
    for _ in range(2):
        engine.add_request("a", "Hello", FINAL)
        drain(engine)
    engine.add_request("a", "Hello", FINAL)
    engine.abort_request("a")
    engine.add_request("a", "Hello", FINAL)
    assert len(drain(engine)) == 1


def test_aborting_drops_every_sequence_of_a_request(engine, client):
    engine.add_request("a", "Hello", SamplingParams(n=3, max_tokens=None))
    engine.add_request("b", "Hello", FINAL)
    engine.step()
    engine.abort_request(["a", "unknown"])
    assert [output.request_id for output in drain(engine)] == ["b"]
    assert len(client.aborted) == 3


def test_a_request_that_the_core_rejects_leaves_no_state(engine, client):
    add = client.add_request

    def refuse_the_second(request):
        if len(client.requests) == 1:
            raise RequestError("no")
        add(request)

    client.add_request = refuse_the_second
    with pytest.raises(RequestError):
        engine.add_request("a", "Hello", SamplingParams(n=2))
    assert not engine.has_unfinished_requests()
    assert not client.has_requests()


def test_a_failing_step_stops_the_engine_and_keeps_the_cause(engine, client):
    engine.add_request("a", "Hello", FINAL)
    client.fail_with = OSError("device gone")
    with pytest.raises(EngineDeadError, match="device gone") as caught:
        engine.step()
    assert caught.value.__cause__ is client.fail_with
    client.fail_with = None
    with pytest.raises(EngineDeadError, match="device gone"):
        engine.add_request("b", "Hello", FINAL)
    engine.abort_request("a")
    engine.shutdown()


def test_shutdown_may_be_repeated_and_later_use_is_an_error(engine, client):
    engine.shutdown()
    engine.shutdown()
    assert client.is_shut_down
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.add_request("a", "Hello", FINAL)


def test_with_skip_tokenizer_init_get_tokenizer_is_an_error():
    client = FakeClient(make_config(), lambda request: ANSWER)
    engine = LLMEngine(client.config, client)
    engine.add_request("a", [1, 2], FINAL)
    assert drain(engine)[0].outputs[0].token_ids == ANSWER
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        engine.get_tokenizer()


def test_a_tokenizer_larger_than_the_vocabulary_is_refused_before_the_engine_starts(folder):
    config = make_config(tokenizer=folder, vocab_size=20)
    with pytest.raises(ValueError, match="20"):
        LLMEngine(config, FakeClient(config, lambda request: ANSWER))
