"""The messages between an executor and its workers: calls, results, errors, and the configuration."""

from __future__ import annotations

import io
import os

import msgspec
import pytest

from mvllm.config.engine_args import EngineArgs
from mvllm.config.engine_config import ParallelConfig, replace_field
from mvllm.errors import ConfigError, ModelError, WorkerError
from mvllm.executor.config_codec import decode_config, encode_config
from mvllm.executor.process.activity_table import STARTING, ActivityTable
from mvllm.executor.process.process_utils import PrefixedStream
from mvllm.executor.rpc_executor import worker_names
from mvllm.executor.rpc_messages import codec_of, method_codecs, remove_equal_masks, restore_equal_masks
from mvllm.messages.process_failure import ProcessFailure, describe_failure
from mvllm.messages.sampling_params import SamplingParams
from mvllm.messages.scheduler_output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from mvllm.platform.worker_protocol import KVCacheNeeds


def failure_of(error: BaseException) -> ProcessFailure:
    try:
        raise error
    except BaseException as e:
        failure = describe_failure(e, name="Worker_TP2", activity="load_model", rank=2)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(failure), type=ProcessFailure)


def test_the_configuration_is_unchanged_after_encoding_and_decoding() -> None:
    config = EngineArgs.from_kwargs(
        model="demo", tensor_parallel_size=2, hf_overrides={"rope_theta": 1e6}, seed=2**62
    ).create_engine_config()
    config = replace_field(config, "cache.memory_utilization", 0.25)
    received = decode_config(encode_config(config))
    assert received.model.hf_config.as_dict() == config.model.hf_config.as_dict()
    assert received.model.hf_config.source == config.model.hf_config.source
    config = replace_field(config, "model.hf_config", received.model.hf_config)
    assert received == config
    assert isinstance(received.model.path, type(config.model.path))


@pytest.mark.parametrize("value", [int(1e30), -(2**70), "\ud800", {"deep": [None, True, 1.5, float("inf")]}])
def test_unread_entries_of_config_json_are_sent_too(value: object) -> None:
    config = EngineArgs.from_kwargs(model="demo", hf_overrides={"model_max_length": value}).create_engine_config()
    assert decode_config(encode_config(config)).model.hf_config.get("model_max_length") == value


def test_other_bytes_are_not_decoded_as_a_configuration() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_config(msgspec.msgpack.encode({"model": "demo"}))


def test_plans_and_results_keep_their_types() -> None:
    params = SamplingParams(temperature=0, stop=["x"])
    request = NewRequestData("a", 3, [1, 2, 3], 3, 0, [7], params, [2], more_block_ids=[[8], [9]])
    plan = SchedulerOutput(step=4, new_requests=[request], rows=[3], num_scheduled_tokens=[3])
    codec = codec_of("execute_model")
    assert codec.arguments.decode(msgspec.msgpack.encode((plan,))) == (plan,)
    output = ModelRunnerOutput(step=4, sampled_token_ids=[9], errors={0: "NaN"})
    assert codec.result.decode(msgspec.msgpack.encode(output)) == output
    for needs in (KVCacheNeeds(10, (16, 32)), KVCacheNeeds(10, (16,), (None, 9))):
        assert codec_of("kv_cache_needs").result.decode(msgspec.msgpack.encode(needs)) == needs
    assert codec_of("group_layers").arguments.decode(msgspec.msgpack.encode(([None, 9],))) == ([None, 9],)


def test_arguments_of_other_types_and_other_methods_are_refused() -> None:
    for wrong in ((1,), (1, "2"), (1, 2, 3)):
        with pytest.raises(msgspec.ValidationError):
            codec_of("allocate_kv_cache").arguments.decode(msgspec.msgpack.encode(wrong))
    with pytest.raises(ConfigError, match="workers offer"):
        codec_of("__init__")
    assert "execute_model" in method_codecs()


def test_errors_of_mvllm_keep_their_class_and_others_become_worker_errors() -> None:
    ours = failure_of(ModelError("no such tensor")).to_exception()
    assert type(ours) is ModelError
    assert str(ours) == f"Worker_TP2 (rank 2, pid {os.getpid()}) failed in load_model: no such tensor"
    other = failure_of(OSError(28, "No space left on device")).to_exception()
    assert isinstance(other, WorkerError)
    assert (other.rank, other.pid, other.activity) == (2, os.getpid(), "load_model")
    assert "OSError: [Errno 28] No space left on device" in str(other)
    for error in (ours, other):
        assert "in failure_of" in str(error.__cause__)


def test_an_unprintable_error_is_sent_without_its_text() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert "Mute" in str(failure_of(Mute()).to_exception())
    assert "\\udc80" in str(failure_of(ValueError("\udc80")).to_exception())


def test_workers_are_named_by_their_parallel_ranks() -> None:
    def names(tp: int, pp: int) -> list[str]:
        parallel = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp)
        return worker_names(parallel, tp * pp)

    assert names(1, 1) == ["Worker"]
    assert names(2, 1) == ["Worker_TP0", "Worker_TP1"]
    assert names(1, 2) == ["Worker_PP0", "Worker_PP1"]
    assert names(2, 2) == ["Worker_PP0_TP0", "Worker_PP0_TP1", "Worker_PP1_TP0", "Worker_PP1_TP1"]
    assert worker_names(ParallelConfig(tensor_parallel_size=8), 1) == ["Worker"]  # one process drives eight devices
    two_each = ParallelConfig(tensor_parallel_size=4, pipeline_parallel_size=2)
    assert worker_names(two_each, 4) == names(2, 2)
    assert worker_names(ParallelConfig(pipeline_parallel_size=4), 2) == ["Worker_0", "Worker_1"]


def test_the_activity_table_has_one_row_per_rank_in_every_process_that_maps_it() -> None:
    table = ActivityTable.create(3)
    other = ActivityTable(os.dup(table.fd))
    other.write(1, "execute_model", request_id=5, step=12)
    other.write(2, "a name that is longer than the forty bytes there are for it")
    assert table.read(0).text == STARTING
    assert (str(table.read(1)), table.read(1).request_id) == ("execute_model of step 12", 5)
    assert table.read(2).text == "a name that is longer than the forty byt"
    assert table.read(1).seconds < 60
    for each in (table, other, table):
        each.close()


def test_every_line_gets_the_prefix_once_however_it_is_written() -> None:
    text = io.StringIO()
    stream = PrefixedStream(text, "(W) ")
    for part in ("a", "b\n", "", "c\nd\n", "\n", "e"):
        assert stream.write(part) == len(part)
    stream.flush()
    assert text.getvalue() == "(W) ab\n(W) c\n(W) d\n(W) \n(W) e"


def test_equal_masks_are_sent_once_so_that_256_of_them_fit_into_a_slot():
    kinds = [bytes([kind]) * 32_768 for kind in range(6)]
    masks = b"".join(kinds[i * i % 6] for i in range(256))
    fewer = remove_equal_masks(256, masks)
    assert fewer is not None
    distinct, indices = fewer
    slot = ParallelConfig().mq_slot_bytes
    assert len(masks) == 8 * slot and len(distinct) + 4 * len(indices) < slot
    assert restore_equal_masks(distinct, indices) == masks


def test_few_or_different_masks_are_sent_as_they_are():
    assert remove_equal_masks(2, bytes(2 * 4000)) is None
    assert remove_equal_masks(64, b"".join(bytes([i]) * 4000 for i in range(64))) is None
