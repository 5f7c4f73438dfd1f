"""The connectors between engines, in two processes over real sockets and real shared memory, or in this one."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import types

import pytest

from mvllm.errors import ConfigError
from mvllm.extension_api.kv_transfer import KVRequest
from mvllm_kv_transfer.remote import block_client, remote_connector
from mvllm_kv_transfer.remote.messages import MAX_MESSAGE_BYTES
from mvllm_kv_transfer.remote.tcp import KEY_VARIABLE
from tests.helpers.processes import shared_memory_names, stop_process

kv_engines = importlib.import_module("plugins.kv-transfer.tests.kv_engines")
ProducerProcess, make_connector = kv_engines.ProducerProcess, kv_engines.make_connector
NUM_BLOCKS, host_block, key_of = kv_engines.NUM_BLOCKS, kv_engines.host_block, kv_engines.key_of
fill, is_filled, poll = kv_engines.fill, kv_engines.is_filled, kv_engines.poll
finish_request, look_up, load = kv_engines.finish_request, kv_engines.look_up, kv_engines.load

NAMES = ("tcp", "shared_memory", "nixl")
IN_TWO_PROCESSES = ("tcp", "shared_memory")


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "a key of engines in tests, shared")


class OneProcessAgent:
    """What the connector `nixl` uses of a NIXL agent, for engines that share the memory of this process.

    Attributes:
        result: How the next transfers end.
    """

    result = "DONE"

    def __init__(self, name, config):
        self.name, self.remote = name, set()

    def register_memory(self, regions, kind):
        return regions, kind

    def deregister_memory(self, registered):
        assert registered[1] == "DRAM"

    def get_agent_metadata(self):
        return self.name.encode()

    def add_remote_agent(self, metadata):
        self.remote.add(metadata)
        return metadata

    def remove_remote_agent(self, name):
        self.remote.remove(name.encode())

    def get_xfer_descs(self, regions, kind):
        return regions

    def initialize_xfer(self, operation, local, remote, name, message):
        assert operation == "READ" and name.encode() in self.remote
        return [(own[0], other[0], own[1]) for own, other in zip(local, remote, strict=True)]

    def transfer(self, handle):
        return "PROC"

    def check_xfer_state(self, handle):
        for own, other, size in handle:
            ctypes.memmove(own, other, size)
        return self.result

    def release_xfer_handle(self, handle):
        pass


@pytest.fixture(autouse=True)
def agents(monkeypatch):
    """The module of NIXL that the connector imports; tests/clients/test_nixl.py uses the real one."""
    module = types.ModuleType("nixl._api")
    module.nixl_agent, module.nixl_agent_config = OneProcessAgent, dict
    monkeypatch.setitem(sys.modules, "nixl", types.ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", module)


@pytest.fixture
def make():
    """Makes connectors that are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make_one(*args, **options):
            connector = make_connector(*args, **options)
            stack.callback(connector.close)
            return connector

        yield make_one


@pytest.fixture
def start_producer():
    """Starts producers in processes of their own."""
    with contextlib.ExitStack() as stack:

        def start_one(*args, **options):
            producer = ProducerProcess(*args, **options)
            stack.callback(producer.close)
            return producer

        yield start_one


def test_params(make):
    """The request to the consumer names the producer's request, engine and, over TCP, address."""
    params = finish_request(make("tcp", "producer", engine_id="p"), [host_block(0)])
    port = params.pop("remote_port")
    assert 0 < port < 65536
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p",
        "remote_request_id": "0:r",
        "remote_host": "127.0.0.1",
    }


@pytest.mark.parametrize("name", IN_TWO_PROCESSES)
class TestTwoProcesses:
    def test_blocks_and_states_arrive_byte_for_byte(self, name, make, start_producer):
        producer, consumer = start_producer(name), make(name, "consumer")
        request = KVRequest("q", producer.params)
        keys = [key_of(number) for number in (0, 1, 7, 2)] + [key_of(1, is_state=True)]
        assert look_up(consumer, request, keys) == [True, True, False, True, True]
        blocks = [host_block(0, 3), host_block(1, 2), host_block(2, 7), host_block(1, 0, is_state=True)]
        assert set(load(consumer, request, blocks).values()) == {True}
        assert all(is_filled(consumer, block) for block in blocks)
        assert load(consumer, request, [host_block(7, 1), host_block(3, 1)]) == {key_of(7): False, key_of(3): True}
        assert is_filled(consumer, host_block(3, 1))

    def test_a_producer_that_is_killed_before_the_lookup_is_not_waited_for(self, name, make, start_producer):
        producer, consumer = start_producer(name), make(name, "consumer", lookup_seconds=100)
        producer.kill()
        start = time.monotonic()
        assert look_up(consumer, KVRequest("q", producer.params), [key_of(0)]) == [False]
        assert time.monotonic() - start < 60

    def test_a_producer_that_is_killed_before_the_transfer_fails_the_loads(self, name, make, start_producer):
        producer, consumer = start_producer(name), make(name, "consumer")
        request = KVRequest("q", producer.params)
        assert look_up(consumer, request, [key_of(0), key_of(1)]) == [True, True]
        producer.kill()
        assert load(consumer, request, [host_block(0), host_block(1)]) == {key_of(0): False, key_of(1): False}

    def test_a_producer_that_hangs_is_given_up(self, name, make, start_producer):
        producer = start_producer(name)
        consumer = make(name, "consumer", lookup_seconds=3.0, step_seconds=3.0, transfer_seconds=3.0)
        request, other = KVRequest("q", producer.params), KVRequest("o", producer.params)
        assert look_up(consumer, request, [key_of(0)]) == [True]
        stop_process(producer.process.pid)
        try:
            assert load(consumer, request, [host_block(0)]) == {key_of(0): False}
            assert look_up(consumer, other, [key_of(0)]) == [False]
        finally:
            os.kill(producer.process.pid, signal.SIGCONT)

    def test_nothing_is_left_of_killed_processes(self, name, make, start_producer):
        before = shared_memory_names()
        producer, consumer = start_producer(name), make(name, "consumer")
        look_up(consumer, KVRequest("q", producer.params), [key_of(0)])
        producer.kill()
        assert shared_memory_names() == before

    def test_a_restarted_engine_has_other_blocks(self, name, make):
        first = make(name, "producer", engine_id="same")
        params = finish_request(first, [host_block(0)])
        consumer = make(name, "consumer")
        assert look_up(consumer, KVRequest("q", params), [key_of(0)]) == [True]
        first.close()
        options = {"port": params["remote_port"]} if name != "shared_memory" else {}
        second = make(name, "producer", engine_id="same", **options)
        assert look_up(consumer, KVRequest("o", params), [key_of(0)]) == [False]
        again = finish_request(second, [host_block(1)])
        assert look_up(consumer, KVRequest("p", again), [key_of(1)]) == [True]


@pytest.mark.parametrize("name", NAMES)
class TestEnginesThatDiffer:
    def test_another_namespace_is_refused_with_the_part_that_differs(self, name, make, caplog):
        producer = make(name, "producer", namespace=b"p" * 32, parts={"model": "sha-1", "version": "1"})
        consumer = make(name, "consumer", parts={"model": "sha-2", "version": "1"})
        params = finish_request(producer, [host_block(0)])
        with caplog.at_level(logging.WARNING):
            assert look_up(consumer, KVRequest("q", params), [key_of(0)]) == [False]
        sentence = "has other blocks: model is sha-1 on the producer and sha-2 on the consumer."
        assert sum(sentence in record.message for record in caplog.records) == 1
        assert look_up(consumer, KVRequest("o", params), [key_of(0)]) == [False]

    def test_blocks_of_another_size_are_refused(self, name, make, caplog):
        producer = make(name, "producer", rank_bytes=[100])
        params = finish_request(producer, [host_block(0)])
        with caplog.at_level(logging.WARNING):
            assert look_up(make(name, "consumer"), KVRequest("q", params), [key_of(0)]) == [False]
        assert "blocks and states have 100 and 1000 bytes on the producer" in caplog.text

    def test_a_model_without_states_works_with_its_like_only(self, name, make):
        params = finish_request(make(name, "producer", has_states=False), [host_block(0)])
        alike = make(name, "consumer", has_states=False)
        assert look_up(alike, KVRequest("q", params), [key_of(0)]) == [True]
        assert load(alike, KVRequest("q", params), [host_block(0, 2)]) == {key_of(0): True}
        assert look_up(make(name, "consumer"), KVRequest("q", params), [key_of(0)]) == [False]

    def test_a_model_with_states_only_has_blocks_without_bytes(self, name, make):
        producer, consumer = make(name, "producer", rank_bytes=[0]), make(name, "consumer", rank_bytes=[0])
        blocks = [host_block(0, is_state=True), host_block(1, is_state=True)]
        request = KVRequest("q", finish_request(producer, blocks))
        assert look_up(consumer, request, [block.key for block in blocks]) == [True, True]
        assert set(load(consumer, request, [host_block(1, 0, is_state=True)]).values()) == {True}
        assert is_filled(consumer, host_block(1, 0, is_state=True))


@pytest.mark.parametrize("name", NAMES)
class TestHolding:
    def test_a_save_ends_when_the_block_has_been_fetched(self, name, make):
        producer, consumer = make(name, "producer"), make(name, "consumer")
        blocks = [host_block(0), host_block(1)]
        params = finish_request(producer, blocks)
        assert producer.poll() == []
        request = KVRequest("q", params)
        look_up(consumer, request, [key_of(0)])
        load(consumer, request, blocks[:1])
        assert [result.block for result in poll(producer, 1)] == blocks[:1]
        consumer.request_finished(request, [])  # which releases the others
        assert [result.block for result in poll(producer, 1)] == blocks[1:]

    def test_a_block_that_is_discarded_while_it_is_sent_is_not_used(self, name, make, monkeypatch):
        producer, consumer = make(name, "producer"), make(name, "consumer")
        request = KVRequest("q", finish_request(producer, [host_block(0), host_block(1)]))
        look_up(consumer, request, [key_of(0), key_of(1)])
        send_contents = producer._transport.send_contents

        async def send_and_discard(channel, blocks):
            await send_contents(channel, blocks)
            producer.discard([key_of(0)])

        monkeypatch.setattr(producer._transport, "send_contents", send_and_discard)
        assert load(consumer, request, [host_block(0, 4), host_block(1, 5)]) == {key_of(0): False, key_of(1): True}
        assert is_filled(consumer, host_block(1, 5))
        assert {result.block for result in poll(producer, 2)} == {host_block(0), host_block(1)}, "both saves have ended"
        assert producer.stats()["sent_blocks"] == 1

    def test_a_save_of_other_blocks_ends_at_once(self, name, make):
        producer = make(name, "producer")
        producer.start_save([host_block(5)])
        [result] = producer.poll()
        assert (result.block, result.is_load, result.ok) == (host_block(5), False, True)

    def test_blocks_that_were_saved_just_before_the_request_ended_are_held(self, name, make):
        """Core may not know yet that their saves have ended, so that it does not save them again."""
        producer, consumer = make(name, "producer"), make(name, "consumer")
        producer.start_save([fill(producer, host_block(0)), host_block(1)])
        params = producer.request_finished(KVRequest("r"), [key_of(0)])
        assert [result.block for result in producer.poll()] == [host_block(1)]
        request = KVRequest("q", params)
        assert look_up(consumer, request, [key_of(0)]) == [True]
        assert load(consumer, request, [host_block(0, 4)]) == {key_of(0): True}

    def test_a_save_ends_when_nobody_has_fetched_the_block_in_time(self, name, make):
        producer, consumer = make(name, "producer", hold_seconds=0.2), make(name, "consumer")
        params = finish_request(producer, [host_block(0)])
        poll(producer, 1)
        assert look_up(consumer, KVRequest("q", params), [key_of(0)]) == [False]

    def test_at_most_a_fraction_of_the_host_blocks_is_held(self, name, make):
        producer = make(name, "producer", max_held_fraction=0.25)
        for number in range(NUM_BLOCKS):
            finish_request(producer, [host_block(number)], f"r{number}")
        assert producer.stats()["held_blocks"] == 2
        assert len(producer.poll()) == NUM_BLOCKS - 2

    def test_a_lookup_waits_for_blocks_that_are_saved_soon(self, name, make):
        producer, consumer = make(name, "producer"), make(name, "consumer")
        params = producer.request_finished(KVRequest("r"), [key_of(0)])
        request = KVRequest("q", params)
        assert consumer.lookup(request, [key_of(0)]) is None
        timer = threading.Timer(0.2, lambda: producer.start_save([fill(producer, host_block(0))]))
        timer.start()
        assert look_up(consumer, request, [key_of(0)]) == [True]
        timer.join()

    def test_two_sequences_of_one_request_fetch_each_their_blocks(self, name, make):
        producer, consumer = make(name, "producer"), make(name, "consumer")
        params = finish_request(producer, [host_block(0), host_block(1)])
        one, two = KVRequest("q1", params), KVRequest("q2", params)
        look_up(consumer, one, [key_of(0)])
        look_up(consumer, two, [key_of(0), key_of(1)])
        consumer.request_finished(one, [])
        assert load(consumer, two, [host_block(0, 4), host_block(1, 5)]) == {key_of(0): True, key_of(1): True}

    def test_a_request_that_is_aborted_during_the_transfer_ends_it_in_order(self, name, make):
        producer, consumer = make(name, "producer"), make(name, "consumer")
        blocks = [host_block(number) for number in range(4)]
        request = KVRequest("q", finish_request(producer, blocks))
        look_up(consumer, request, [block.key for block in blocks])
        consumer.start_load(request, blocks)
        consumer.request_finished(request, [])
        assert len(poll(consumer, 4)) == 4
        assert len(poll(producer, 4)) == 4


@pytest.mark.parametrize("name", NAMES)
class TestRoles:
    def test_requests_without_params_have_nothing_elsewhere(self, name, make):
        consumer = make(name, "consumer")
        assert consumer.lookup(KVRequest("q"), [key_of(0)]) == [False]
        assert load(consumer, KVRequest("q"), [host_block(0)]) == {key_of(0): False}

    def test_a_consumer_answers_without_params(self, name, make):
        request = KVRequest("q", {"do_remote_decode": True})
        assert make(name, "consumer").request_finished(request, [key_of(0)]) is None

    def test_an_engine_with_both_roles_answers_with_params_if_the_request_asks(self, name, make):
        engine = make(name, "both")
        assert engine.request_finished(KVRequest("q"), [key_of(0)]) is None
        assert engine.request_finished(KVRequest("q", {"do_remote_decode": True}), [key_of(0)]) is not None

    def test_two_engines_with_both_roles_fetch_from_each_other(self, name, make):
        engines = make(name, "both"), make(name, "both")
        for one, other in (engines, engines[::-1]):
            request = KVRequest("q", finish_request(one, [host_block(0)]))
            assert look_up(other, request, [key_of(0)]) == [True]
            assert load(other, request, [host_block(0, 6)]) == {key_of(0): True}
            assert [result.is_load for result in poll(one, 1)] == [False], "its save has ended"

    def test_an_unknown_role_or_option_is_refused(self, name, make):
        with pytest.raises(ConfigError, match="must be 'producer', 'consumer' or 'both', not 'x'"):
            make(name, "x")
        with pytest.raises(ConfigError, match=f"{name}.*unknown option 'hold_second'. Did you mean 'hold_seconds'"):
            make(name, "both", hold_second=1)
        with pytest.raises(ConfigError, match="max_held_fraction must be a number above 0 up to 1, not 2"):
            make(name, "both", max_held_fraction=2)


class TestNixl:
    def test_blocks_are_read_and_a_failed_read_is_a_failed_load(self, make, monkeypatch):
        producer, consumer = make("nixl", "producer"), make("nixl", "consumer")
        request = KVRequest("q", finish_request(producer, [host_block(number) for number in range(3)]))
        look_up(consumer, request, [key_of(0), key_of(1)])
        assert load(consumer, request, [host_block(0, 3), host_block(7, 4)]) == {key_of(0): True, key_of(7): False}
        assert is_filled(consumer, host_block(0, 3))
        monkeypatch.setattr(OneProcessAgent, "result", "ERR")
        assert load(consumer, request, [host_block(1, 3)]) == {key_of(1): False}

    def test_the_library_is_needed(self, make, monkeypatch):
        monkeypatch.setitem(sys.modules, "nixl._api", None)
        with pytest.raises(ConfigError, match=r"Run: .*pip install 'nixl"):
            make("nixl", "consumer")


class TestUntrustedParams:
    @pytest.mark.parametrize(
        "change",
        [
            {"remote_request_id": None},
            {"remote_request_id": "x" * 5000},
            {"remote_request_id": ["r"]},
            {"remote_host": 7},
            {"remote_host": "10.0.0.1"},
            {"remote_host": "localhost"},
            {"remote_port": "80"},
            {"remote_port": True},
            {"remote_port": 1 << 20},
            {"remote_port": -1},
        ],
        ids=str,
    )
    def test_tcp_params_that_are_not_allowed_connect_to_nothing(self, change, make, caplog):
        producer, consumer = make("tcp", "producer"), make("tcp", "consumer")
        params = {**finish_request(producer, [host_block(0)]), **change}
        with caplog.at_level(logging.WARNING):
            assert consumer.lookup(KVRequest("q", params), [key_of(0)]) == [False]
        assert "kv_transfer_params of request 'q' are not used: " in caplog.text

    def test_engines_of_the_shared_memory_are_named_by_text(self, make):
        consumer = make("shared_memory", "consumer")
        for engine_id in (None, 7, "", "x" * 1000, "a\0b"):
            params = {"do_remote_prefill": True, "remote_request_id": "r", "remote_engine_id": engine_id}
            assert consumer.lookup(KVRequest(repr(engine_id)[:20], params), [key_of(0)]) == [False]

    def test_peers_are_hosts_ports_and_networks(self, make):
        producer = make("tcp", "producer")
        params = finish_request(producer, [host_block(0)])
        port = params["remote_port"]
        for number, (peer, allowed) in enumerate(
            {
                f"127.0.0.1:{port}": True,
                f"127.0.0.1:{port - 1}-{port}": True,
                "127.0.0.1:1": False,
                "127.0.0.1:1-2": False,
                "127.0.0.1": True,
                "127.0.0.0/8": True,
                "10.0.0.0/8": False,
            }.items()
        ):
            consumer = make("tcp", "consumer", peers=[peer])
            assert look_up(consumer, KVRequest(str(number), params), [key_of(0)]) == [allowed]
        for peer in ("10.0.0.0/99", "host:port", "", ":7000", "host:2-1", "host:0", "host:1-70000", "host:1-"):
            with pytest.raises(ConfigError, match="peers: "):
                make("tcp", "consumer", peers=[peer])

    @pytest.mark.parametrize("name", ["tcp", "nixl"])
    def test_an_engine_that_names_no_peers_connects_to_nothing(self, name, make):
        make(name, "producer")
        for role in ("consumer", "both"):
            with pytest.raises(ConfigError, match=f"role '{role}' uses only producers that `peers`"):
                make(name, role, peers=[])

    def test_addresses_of_requests_are_forgotten(self, make, monkeypatch):
        monkeypatch.setattr(block_client, "_UNREACHABLE_SECONDS", 0.0)
        monkeypatch.setattr(block_client, "_MAX_IDLE_SECONDS", 0.2)
        consumer = make("tcp", "consumer", peers=["127.0.0.1:1-1000"])
        params = {"do_remote_prefill": True, "remote_request_id": "r", "remote_host": "127.0.0.1"}
        for port in range(1, 5):
            assert look_up(consumer, KVRequest(str(port), {**params, "remote_port": port}), [key_of(0)]) == [False]
        deadline = time.monotonic() + 120
        while consumer._client.num_peers:
            assert time.monotonic() < deadline, "an engine that nobody asks is still known"
            time.sleep(0.05)

    def test_the_number_of_addresses_is_bounded(self, make, monkeypatch, caplog):
        """A connection that is kept, and addresses that cannot be reached, give way to the next ones."""
        monkeypatch.setattr(block_client, "_MAX_PEERS", 3)
        monkeypatch.setattr(remote_connector, "_MAX_WARNED", 3)
        producer, consumer = make("tcp", "producer"), make("tcp", "consumer")
        request = KVRequest("q", finish_request(producer, [host_block(0)]))
        params = {"do_remote_prefill": True, "remote_request_id": "r", "remote_host": "127.0.0.1"}
        assert look_up(consumer, request, [key_of(0)]) == [True]
        for port in range(1, 9):
            assert look_up(consumer, KVRequest(str(port), {**params, "remote_port": port}), [key_of(0)]) == [False]
            assert consumer._client.num_peers <= 3
        assert len([each for each in caplog.records if each.levelno == logging.WARNING]) == 3
        assert load(consumer, request, [host_block(0, 3)]) == {key_of(0): True}, "it is connected again"

    def test_an_engine_beyond_the_bound_is_not_asked_while_all_others_are_being_asked(self, make, monkeypatch):
        monkeypatch.setattr(block_client, "_MAX_PEERS", 2)
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
            consumer = make("tcp", "consumer")
            params = {"do_remote_prefill": True, "remote_request_id": "r", "remote_host": "127.0.0.1"}
            requests = [
                KVRequest(str(number), {**params, "remote_port": each.getsockname()[1]})
                for number, each in enumerate(silent)
            ]
            for request in requests[:2]:
                assert consumer.lookup(request, [key_of(0)]) is None
            assert look_up(consumer, requests[2], [key_of(0)], seconds=2) == [False]
            assert consumer.lookup(requests[0], [key_of(0)]) is None, "it still waits for its own"


class TestKeys:
    def test_an_engine_with_another_key_gets_nothing(self, make, monkeypatch, caplog):
        producer = make("tcp", "producer")
        params = finish_request(producer, [host_block(0)])
        monkeypatch.setenv(KEY_VARIABLE, "another key, which is long enough")
        with caplog.at_level(logging.WARNING):
            assert look_up(make("tcp", "consumer"), KVRequest("q", params), [key_of(0)]) == [False]
        assert "keys" in caplog.text or "another key" in caplog.text

    def test_a_key_is_required(self, make, monkeypatch, tmp_path):
        file = tmp_path / "key"
        file.write_text("short\n")
        with pytest.raises(ConfigError, match="has a key of 5 bytes; it must have at least 16"):
            make("tcp", "consumer", key_file=str(file))
        with pytest.raises(ConfigError, match="cannot be read"):
            make("tcp", "consumer", key_file=str(tmp_path / "none"))
        monkeypatch.delenv(KEY_VARIABLE)
        with pytest.raises(ConfigError, match="needs a key that both engines share"):
            make("tcp", "producer")

    def test_addresses_that_cannot_be_used_are_refused(self, make):
        with pytest.raises(ConfigError, match="Set advertised_host"):
            make("tcp", "producer", host="0.0.0.0")
        with pytest.raises(ConfigError, match=r"cannot listen at '192\.0\.2\.1', port 0"):
            make("tcp", "producer", host="192.0.2.1")

    @pytest.mark.parametrize(
        "data",
        [b"", b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, b"mvllm-kv-1\n" + bytes(32) + bytes(32) + b"\xff" * 100],
        ids=["nothing", "http", "a wrong proof"],
    )
    def test_foreign_clients_do_not_disturb_it(self, make, data):
        producer = make("tcp", "producer", step_seconds=0.5)
        params = finish_request(producer, [host_block(0)])
        with socket.create_connection(("127.0.0.1", params["remote_port"])) as foreign:
            foreign.sendall(data)
            foreign.settimeout(120)
            received = bytearray()
            with contextlib.suppress(ConnectionResetError):
                while part := foreign.recv(1 << 16):
                    received += part
            assert len(received) <= 11 + 32 + 32  # nothing but random numbers and a proof
        assert look_up(make("tcp", "consumer"), KVRequest("q", params), [key_of(0)]) == [True]


class _Man:
    """Passes bytes between a consumer and a producer, and changes the direction to the consumer after some of them."""

    def __init__(self, port: int, change_at: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._target, self._change_at = port, change_at
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                consumer, _ = self._listener.accept()
                producer = socket.create_connection(("127.0.0.1", self._target))
                threading.Thread(target=self._copy, args=(consumer, producer, -1), daemon=True).start()
                threading.Thread(target=self._copy, args=(producer, consumer, self._change_at), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, change_at: int) -> None:
        position = 0
        with contextlib.suppress(OSError), source, target:
            while data := bytearray(source.recv(1 << 16)):
                if 0 <= change_at - position < len(data):
                    data[change_at - position] ^= 1
                position += len(data)
                target.sendall(data)

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("change_at", [5, 20, 60, 90, 130, 200, 100_000, 1_000_000])
def test_bytes_that_are_changed_on_their_way_are_found(make, change_at):
    producer, consumer = make("tcp", "producer"), make("tcp", "consumer", step_seconds=0.5, lookup_seconds=1.0)
    params = finish_request(producer, [host_block(0)])
    man = _Man(params["remote_port"], change_at)
    try:
        request = KVRequest("q", {**params, "remote_port": man.port})
        if look_up(consumer, request, [key_of(0)]) == [True]:
            assert load(consumer, request, [host_block(0, 4)]) == {key_of(0): False}
    finally:
        man.close()


def test_long_messages_are_refused(make):
    """A peer that knows the key, and claims a message beyond the limit, is disconnected."""
    import asyncio

    from mvllm_kv_transfer.remote.channel import Channel, ChannelError

    async def talk() -> None:
        one, two = socket.socketpair()
        one.setblocking(False)
        two.setblocking(False)
        channel = Channel(two, 1.0)
        one.send((MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))
        with pytest.raises(ChannelError, match="sent a message of 16777217 bytes; the limit is 16777216"):
            await channel.receive_any()
        one.send((5).to_bytes(4, "big") + b"\x91\xa1x\0\0")
        with pytest.raises(ChannelError, match="sent an invalid message"):
            await channel.receive_any()
        one.close()
        two.close()

    asyncio.run(talk())
