"""Two engines' connectors `nixl` in two processes: blocks and a state arrive, and a killed producer fails the loads."""

from __future__ import annotations

from mvllm.kv_transfer.connector import KVRequest
from tests.helpers.kv_engines import ProducerProcess, host_block, is_filled, key_of, load, look_up, make_connector


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
