"""Exceptions that travel from an engine core's process: what is raised is what was raised there."""

from __future__ import annotations

import msgspec
import pytest

from mvllm.engine.process.remote_exceptions import ProcessTraceback, describe_process_failure, rebuild_exception
from mvllm.errors import CacheError, EngineDeadError, PlatformError, RequestError, WorkerDiedError, WorkerStuckError
from mvllm.messages.core_protocol import ProcessFailure


class StrangersError(OSError):
    pass


class BrokenText(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def travel(error: BaseException) -> Exception:
    """`error`, raised, described, sent and made again."""
    try:
        raise error
    except BaseException as e:
        failure = describe_process_failure(e, name="EngineCore", activity="load model")
    return rebuild_exception(msgspec.msgpack.decode(msgspec.msgpack.encode(failure), type=ProcessFailure))


@pytest.mark.parametrize(
    "cls", [CacheError, EngineDeadError, PlatformError, ValueError, FileNotFoundError, MemoryError]
)
def test_errors_of_mvllm_and_of_python_keep_class_and_text(cls):
    error = travel(cls("7 bytes are missing"))
    assert type(error) is cls
    assert str(error) == "7 bytes are missing"


def test_what_an_error_knows_travels_too():
    died = WorkerDiedError("it died", rank=3, pid=44, activity="execute_model of step 2", exit_code=-9)
    error = travel(died)
    assert isinstance(error, WorkerDiedError)
    assert (error.rank, error.pid, error.activity, error.exit_code) == (3, 44, "execute_model of step 2", -9)
    stuck = travel(WorkerStuckError("it hangs", rank=0, pid=1, activity="x"))
    assert isinstance(stuck, TimeoutError)
    assert travel(RequestError("no", parameter="prompt")).parameter == "prompt"


def test_causes_follow_and_the_traceback_comes_last():
    error = EngineDeadError("Step 1 failed")
    error.__cause__ = WorkerDiedError("rank 1 died", rank=1, pid=2, activity="a", exit_code=3)
    found = travel(error)
    assert isinstance(found.__cause__, WorkerDiedError) and found.__cause__.rank == 1
    last = found.__cause__.__cause__
    assert isinstance(last, ProcessTraceback)
    assert "In EngineCore (pid " in str(last) and "during load model" in str(last) and "in travel" in str(last)


def test_a_class_that_is_not_known_here_becomes_its_nearest_known_base_and_keeps_its_name():
    error = travel(StrangersError("gone"))
    assert type(error) is OSError
    assert str(error) == f"{StrangersError.__module__}.StrangersError: gone"


def test_what_no_class_fits_is_an_engine_error():
    error = travel(SystemExit(3))
    assert type(error) is EngineDeadError
    assert str(error) == "SystemExit: 3"


def test_an_error_without_a_text_still_travels():
    error = travel(BrokenText())
    assert isinstance(error, ValueError)
    assert "cannot be had: RuntimeError" in str(error)


def test_texts_of_any_size_and_content_fit():
    failure = describe_process_failure(ValueError("\ud800" + "x" * 10**6 + "end"), name="EngineCore", activity="a")
    encoded = msgspec.msgpack.encode(failure)
    assert len(encoded) < 64 << 10
    assert failure.exceptions[0].message.startswith("\\ud800xx") and failure.exceptions[0].message.endswith("end")
