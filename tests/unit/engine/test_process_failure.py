"""Exceptions that are sent to another process and raised there again."""

from __future__ import annotations

import msgspec
import pytest

from mvllm.errors import CacheError, EngineDeadError, PlatformError, RequestError, WorkerDiedError, WorkerStuckError
from mvllm.messages.process_failure import ProcessFailure, RemoteTraceback, describe_failure


class UnknownError(OSError):
    pass


class BrokenText(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def round_trip(error: BaseException) -> Exception:
    """`error` after raising, encoding, decoding and rebuilding."""
    try:
        raise error
    except BaseException as e:
        failure = describe_failure(e, name="EngineCore", activity="load model")
    return msgspec.msgpack.decode(msgspec.msgpack.encode(failure), type=ProcessFailure).to_exception()


@pytest.mark.parametrize(
    "cls", [CacheError, EngineDeadError, PlatformError, ValueError, FileNotFoundError, MemoryError]
)
def test_errors_of_mvllm_and_of_python_keep_class_and_text(cls):
    error = round_trip(cls("7 bytes are missing"))
    assert type(error) is cls
    assert str(error) == "7 bytes are missing"


def test_attributes_of_mvllms_errors_are_sent():
    died = WorkerDiedError("it died", rank=3, pid=44, activity="execute_model of step 2", exit_code=-9)
    error = round_trip(died)
    assert isinstance(error, WorkerDiedError)
    assert (error.rank, error.pid, error.activity, error.exit_code) == (3, 44, "execute_model of step 2", -9)
    stuck = round_trip(WorkerStuckError("it hangs", rank=0, pid=1, activity="x"))
    assert isinstance(stuck, TimeoutError)
    assert round_trip(RequestError("no", parameter="prompt")).parameter == "prompt"


def test_causes_follow_and_the_traceback_comes_last():
    error = EngineDeadError("Step 1 failed")
    error.__cause__ = WorkerDiedError("rank 1 died", rank=1, pid=2, activity="a", exit_code=3)
    found = round_trip(error)
    assert isinstance(found.__cause__, WorkerDiedError) and found.__cause__.rank == 1
    last = found.__cause__.__cause__
    assert isinstance(last, RemoteTraceback)
    assert "In EngineCore (pid " in str(last) and "during load model" in str(last) and "in round_trip" in str(last)


def test_an_unknown_class_becomes_its_nearest_known_base_and_keeps_its_name():
    error = round_trip(UnknownError("gone"))
    assert type(error) is OSError
    assert str(error) == f"{UnknownError.__module__}.UnknownError: gone"


def test_an_exception_without_a_known_base_becomes_an_engine_dead_error():
    error = round_trip(SystemExit(3))
    assert type(error) is EngineDeadError
    assert str(error) == "SystemExit: 3"


def test_an_unprintable_error_is_sent_without_its_text():
    error = round_trip(BrokenText())
    assert isinstance(error, ValueError)
    assert "cannot be read: RuntimeError" in str(error)


def test_long_texts_are_truncated_and_made_valid_unicode():
    failure = describe_failure(ValueError("\ud800" + "x" * 10**6 + "end"), name="EngineCore", activity="a")
    encoded = msgspec.msgpack.encode(failure)
    assert len(encoded) < 64 << 10
    assert failure.exceptions[0].message.startswith("\\ud800xx") and failure.exceptions[0].message.endswith("end")
