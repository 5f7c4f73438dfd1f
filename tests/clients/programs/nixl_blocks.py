"""Two engines' connectors `nixl` in two processes: blocks and a state arrive, and a killed producer fails the loads."""

from __future__ import annotations

import importlib

from mvllm.extension_api.kv_transfer import KVRequest

kv_engines = importlib.import_module("plugins.kv-transfer.tests.kv_engines")
ProducerProcess, make_connector = kv_engines.ProducerProcess, kv_engines.make_connector
host_block, key_of, is_filled = kv_engines.host_block, kv_engines.key_of, kv_engines.is_filled
look_up, load = kv_engines.look_up, kv_engines.load


def main() -> None:
    producer, consumer = ProducerProcess("nixl"), make_connector("nixl", "consumer")
    request = KVRequest("q", producer.params)
    keys = [key_of(0), key_of(1), key_of(7), key_of(1, is_state=True)]
    assert look_up(consumer, request, keys) == [True, True, False, True]
    blocks = [host_block(0, 3), host_block(1, 2), host_block(1, 0, is_state=True)]
    assert set(load(consumer, request, blocks).values()) == {True}
    assert all(is_filled(consumer, block) for block in blocks)
    producer.kill()
    assert load(consumer, request, [host_block(2)]) == {key_of(2): False}
    consumer.close()
    print("Blocks arrived.")


if __name__ == "__main__":
    main()
