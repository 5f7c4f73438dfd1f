"""Fetching of URLs: hosts that do not answer delay few."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from mvllm.errors import RequestError
from mvllm.multimodal import media_fetcher
from mvllm.multimodal.media_fetcher import FetchGroup, MediaFetcher, current_client
from tests.helpers.processes import wait_until

ALL = media_fetcher.NUM_THREADS


class Hosts:
    """Hosts whose answers wait for `answer`, except those of `fine.test`.

    Attributes:
        asked: The URLs that have been asked for.
        fetcher: Fetches them; contents of more than 100 bytes let others wait.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer = threading.Event()
        self.fetcher = MediaFetcher(self.fetch, 100)

    def fetch(self, url: str) -> bytes:
        self.asked.append(url)
        if "bad" in url:
            raise RequestError("bad")
        assert "fine.test" in url or self.answer.wait(30)
        return b"x" * 60

    def ask(self, client: Any, host: str, count: int = 1, group: FetchGroup | None = None) -> list[Future[bytes]]:
        token = current_client.set(client)
        try:
            return [
                self.fetcher.submit(f"http://{host}/{client}/{i}", group or self.fetcher.group()) for i in range(count)
            ]
        finally:
            current_client.reset(token)

    def num_asked(self, text: str) -> int:
        return sum(text in url for url in self.asked)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    yield hosts
    hosts.answer.set()
    hosts.fetcher.close()


def test_silent_hosts_of_one_client_do_not_delay_another(hosts: Hosts) -> None:
    attack = hosts.ask("attacker", "silent.test", 100)
    for number in range(100):
        attack += hosts.ask("attacker", f"silent{number}.test")
    assert hosts.ask("victim", "fine.test")[0].result(120)
    assert hosts.num_asked("attacker") == media_fetcher.MAX_PER_CLIENT
    assert not any(future.done() for future in attack)


def test_one_silent_host_leaves_room_for_the_other_hosts_of_a_client(hosts: Hosts) -> None:
    silent = hosts.ask("a", "silent.test", 100)
    assert [future.result(120) for future in hosts.ask("a", "fine.test", 3, hosts.fetcher.group())]
    assert hosts.num_asked("silent.test") == media_fetcher.MAX_PER_HOST and not any(each.done() for each in silent)


def test_many_clients_with_silent_hosts_leave_a_thread_for_a_new_one(hosts: Hosts) -> None:
    for client in range(7):
        for host in range(20):
            hosts.ask(f"attacker{client}", f"silent{host}.test")
    wait_until(lambda: len(hosts.asked) >= 60, 120, "the fetches have not begun")
    assert hosts.num_asked("/attacker0/") == media_fetcher.MAX_PER_CLIENT and len(hosts.asked) < ALL
    assert hosts.ask("victim", "fine.test")[0].result(120)


def test_the_programs_own_fetches_use_all_threads(hosts: Hosts) -> None:
    futures = hosts.ask(None, "silent.test", ALL + 5, hosts.fetcher.group())
    wait_until(lambda: len(hosts.asked) == ALL, 120, "the fetches have not begun")
    hosts.answer.set()
    assert all(future.result(120) for future in futures)


def test_fetches_of_a_client_wait_in_turn_and_a_cancelled_one_is_never_sent(hosts: Hosts) -> None:
    running = hosts.ask("a", "silent.test", media_fetcher.MAX_PER_HOST)
    given_up, bad = hosts.ask("a", "silent.test/given-up")[0], hosts.ask("a", "silent.test/bad")[0]
    assert given_up.cancel()
    hosts.answer.set()
    assert all(future.result(120) for future in running)
    with pytest.raises(RequestError, match="bad"):
        bad.result(120)
    assert not hosts.num_asked("given-up")


def test_no_prompt_begins_while_others_hold_much_and_one_that_has_begun_ends(hosts: Hosts) -> None:
    first, second, third = (hosts.fetcher.group() for _ in range(3))
    for group in (first, second):
        assert hosts.ask("a", "fine.test", group=group)[0].result(120)
    [waiting] = hosts.ask("b", "fine.test", group=third)
    assert hosts.ask("a", "fine.test", group=second)[0].result(120) and not waiting.done()
    second.end()
    second.end()
    assert waiting.result(120) and third.num_bytes == 60


def test_after_close_what_waits_has_failed(hosts: Hosts) -> None:
    waiting = hosts.ask("a", "silent.test", 20)[-1]
    hosts.fetcher.close()
    with pytest.raises(RequestError, match="shutting down"):
        waiting.result(0)
    with pytest.raises(RequestError, match="shutting down"):
        hosts.ask("a", "silent.test")
