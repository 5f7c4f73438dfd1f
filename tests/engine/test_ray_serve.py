"""mvllm's Ray Serve application on a cluster of three nodes: losses, changes, autoscaling, routing, several models.

Each node has one core, and each replica takes one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import psutil
import pytest
import ray
from ray import serve

from tests.helpers.changed_weights import changed_copy
from tests.helpers.processes import wait_until

pytest.importorskip("mvllm_ray.serve", reason="mvllm-ray and mvllm-router are not installed", exc_type=ImportError)

from tests.helpers.ray_serve import (
    OPTIONS,
    START_SECONDS,
    Load,
    ServeCluster,
    run_all,
    serve_cluster,
    until_complete,
)
from tests.perf.ray_serve import hit_rate

pytestmark = pytest.mark.exhaustive
LONG = {"max_tokens": 300, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ServeCluster]:
    with serve_cluster() as started:
        yield started


@pytest.fixture(autouse=True)
def nothing_left(cluster: ServeCluster) -> Iterator[None]:
    """After each test the application is deleted, and no server process is left."""
    yield
    cluster.delete()
    wait_until(lambda: not servers(), 120, "no server is left")


def servers() -> list[psutil.Process]:
    """The `mvllm serve` processes of replicas."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if "mvllm.entrypoints.cli.main" in words and "serve" in words:
            found.append(process)
    return found


def ask(cluster: ServeCluster, **body: object) -> object:
    [outcome] = run_all(cluster.url, [body])
    return outcome


# --- losses


def test_a_killed_node_ends_only_the_streams_that_it_computed_and_these_can_be_repeated(cluster: ServeCluster) -> None:
    cluster.deploy(num_replicas=3, max_replicas_per_node=1)
    node = cluster.nodes[0]
    lost = {replica for replica, id in cluster.replica_nodes().items() if id == node.node_id}
    assert len(cluster.replica_nodes()) == 3 and len(lost) == 1
    with Load(cluster.url, 12, **LONG) as load:
        load.wait_for(24)
        assert {each.replica for each in load.outcomes} == set(cluster.replica_nodes())
        cluster.kill_node(node)
        load.wait_for(48)
    failed = [each for each in load.outcomes if not each.is_complete]
    assert failed, "no request was computed by the node when it was killed"
    for each in failed:  # only streams that had begun: others were repeated on another replica
        assert each.replica in lost and each.status == 200 and not each.failure, each
        assert each.error is not None and each.error["code"] == "replica_unavailable"
    assert len(failed) <= 12
    assert ask(cluster).is_complete
    cluster.add_node()
    cluster.wait_for_replicas(3)


def test_without_retries_a_request_of_a_lost_server_ends_with_503_and_succeeds_when_it_is_sent_again(
    cluster: ServeCluster,
) -> None:
    cluster.deploy(ingress={"retries": 0})
    assert ask(cluster).is_complete
    [server] = servers()
    with Load(cluster.url, 4, **LONG) as load:
        load.wait_for(4)
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: any(not each.is_complete for each in load.outcomes), 120, "the loss is noticed")
        refused = [each for each in load.outcomes if each.status == 503]
        wait_until(lambda: bool([each for each in load.outcomes if each.status == 503]), 120, "a request is refused")
        refused = [each for each in load.outcomes if each.status == 503]
        assert all(each.retry_after == "1" and each.error["code"] == "replica_unavailable" for each in refused)
        load._stop.set()
    again = until_complete(lambda: ask(cluster), 60)
    assert again.is_complete
    cluster.wait_for_replicas(1)
    assert server.pid not in {each.pid for each in servers()}


def test_the_server_of_a_killed_replica_ends_too(cluster: ServeCluster) -> None:
    cluster.deploy()
    [server] = servers()
    os.kill(server.ppid(), signal.SIGKILL)
    wait_until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, 120, "the server has ended")
    assert until_complete(lambda: ask(cluster), 60).is_complete


def test_a_client_that_disconnects_aborts_its_request(cluster: ServeCluster) -> None:
    cluster.deploy()
    with httpx2.stream(
        "POST",
        f"{cluster.url}/v1/completions",
        json={"model": "demo", "prompt": "A", "stream": True, **LONG},
        timeout=60,
    ) as response:
        assert response.status_code == 200
        next(response.iter_lines())

    def is_idle() -> bool:
        load = httpx2.get(f"{cluster.url}/load", timeout=30).json()
        return load["num_requests_running"] == 0 and load["server_load"] <= 1

    wait_until(is_idle, 120, "no request runs")


# --- changes


def test_a_model_changes_under_load_without_a_failed_request(cluster: ServeCluster, tmp_path: Path) -> None:
    cluster.deploy(num_replicas=2, model="demo")
    before = ask(cluster, max_tokens=16).text
    import mvllm.demo

    changed = changed_copy(Path(mvllm.demo.__file__).parent / "model", tmp_path / "changed")
    with Load(cluster.url, 8, max_tokens=64, ignore_eos=True) as load:
        load.wait_for(16)
        old = set(cluster.replica_nodes())
        cluster.deploy(num_replicas=2, model=str(changed))
        cluster.wait_for_replicas(2)
        load.wait_for(16)
    assert all(each.is_complete for each in load.outcomes), [e for e in load.outcomes if not e.is_complete][:3]
    assert not old & set(cluster.replica_nodes())
    after = {ask(cluster, max_tokens=16).text for _ in range(4)}
    assert len(after) == 1 and before not in after


def test_with_a_surge_the_new_replica_runs_before_the_old_one_stops(cluster: ServeCluster) -> None:
    cluster.deploy(num_replicas=1, max_surge_percent=100)
    counts = set()
    with Load(cluster.url, 4, max_tokens=32) as load:
        load.wait_for(4)
        cluster.deploy(num_replicas=1, max_surge_percent=100, version="2", wait=False)

        def is_replaced() -> bool:
            counts.add(cluster.replicas().get("RUNNING", 0))
            return serve.status().applications["mvllm"].status == "RUNNING"

        wait_until(is_replaced, 60, "the replica is replaced")
        load.wait_for(4)
    assert all(each.is_complete for each in load.outcomes)
    assert 0 not in counts


def test_the_number_of_replicas_changes_without_new_ones(cluster: ServeCluster) -> None:
    cluster.deploy(num_replicas=1)
    [first] = cluster.replica_nodes()
    cluster.deploy(num_replicas=2)
    cluster.wait_for_replicas(2)
    assert first in cluster.replica_nodes()


# --- load


@pytest.mark.parametrize(
    "target", [{"target_ongoing_requests": 2}, {"target_queue_seconds": 0.02}], ids=["ongoing", "queue"]
)
def test_replicas_follow_the_load_up_and_down(cluster: ServeCluster, target: dict[str, float]) -> None:
    autoscaling = {
        "min_replicas": 1,
        "max_replicas": 3,
        "target_ongoing_requests": 1000,
        "upscale_delay_s": 0.5,
        "downscale_delay_s": 1,
        "metrics_interval_s": 0.5,
        "look_back_period_s": 2,
        **target,
    }
    cluster.deploy(autoscaling=autoscaling, options={**OPTIONS, "max_num_seqs": 2})
    assert cluster.replicas() == {"RUNNING": 1}
    with Load(cluster.url, 16, max_seconds=3 * START_SECONDS, max_tokens=200, ignore_eos=True) as load:
        cluster.wait_for_replicas(3, seconds=2 * START_SECONDS)  # two replicas start beside the load
        used = len(load.outcomes)
        load.wait_for(32)
    assert all(each.is_complete for each in load.outcomes)
    assert len({each.replica for each in load.outcomes[used:]}) == 3
    cluster.wait_for_replicas(1)
    assert ask(cluster).is_complete


def test_prefixes_are_found_more_often_than_in_turn(cluster: ServeCluster) -> None:
    rates = {}
    for routing in ("round_robin", "prefix"):
        cluster.deploy(num_replicas=3, routing=routing, options={**OPTIONS, "kv_cache_memory_bytes": 2 << 20})
        cluster.wait_for_replicas(3)
        rates[routing] = hit_rate(cluster.url, num_prefixes=9, requests_per_prefix=6)
        cluster.delete()
    assert rates["prefix"] > rates["round_robin"] + 0.05, rates


# --- models and nodes


def test_several_models_are_served_behind_one_endpoint_and_change_one_by_one(cluster: ServeCluster) -> None:
    first = {"name": "demo", "options": OPTIONS}
    second = {"name": "tales", "model": "demo", "aliases": ["stories"], "options": {**OPTIONS, "max_model_len": 128}}
    cluster.deploy_models([first, second])
    cards = httpx2.get(f"{cluster.url}/v1/models", timeout=30).json()["data"]
    assert {card["id"]: card["max_model_len"] for card in cards} == {"demo": 512, "tales": 128, "stories": 128}
    found = {name: ask(cluster, model=name) for name in ("demo", "tales", "stories")}
    assert all(each.is_complete for each in found.values())
    assert found["tales"].replica == found["stories"].replica != found["demo"].replica
    unknown = ask(cluster, model="other")
    assert unknown.status == 404 and unknown.error["code"] == "model_not_found"
    kept = set(cluster.replica_nodes("demo"))
    cluster.deploy_models([first, {**second, "version": "2"}])
    assert set(cluster.replica_nodes("demo")) == kept
    assert ask(cluster, model="tales").replica not in (None, found["tales"].replica)
    assert httpx2.get(f"{cluster.url}/health/ready", timeout=30).status_code == 200


@pytest.mark.parametrize("kind", ["tensor", "data"])
def test_parallel_workers_are_on_the_nodes_of_the_placement_group(cluster: ServeCluster, kind: str) -> None:
    cluster.deploy()
    expected = ask(cluster, max_tokens=24).text
    cluster.delete()
    cluster.deploy(
        options={**OPTIONS, f"{kind}_parallel_size": 2},
        distributed={"worker": {"CPU": 1}, "strategy": "STRICT_SPREAD"},
    )
    [group] = [each for each in ray.util.placement_group_table().values() if each["state"] == "CREATED"]
    assert len(set(group["bundles_to_node_id"].values())) == 2
    actors = [each for each in ray._private.state.actors().values() if each["State"] == "ALIVE"]
    nodes = {each["Address"]["NodeID"] for each in actors if each["ActorClassName"].endswith("RayWorker")}
    assert nodes == set(group["bundles_to_node_id"].values())
    assert ask(cluster, max_tokens=24).text == expected


def test_a_drained_node_loses_its_replica_without_a_failed_request(cluster: ServeCluster) -> None:
    cluster.deploy(num_replicas=2, max_replicas_per_node=1)
    node = next(each for each in cluster.nodes if each.node_id in cluster.replica_nodes().values())
    address = ray.get_runtime_context().gcs_address
    try:
        with Load(cluster.url, 8, **LONG) as load:
            load.wait_for(16)
            program = [sys.executable, "-m", "mvllm_ray.serve.cli", "drain", "--address", address]
            drain = [*program, "--node-id", node.node_id, "--timeout", "60"]
            result = subprocess.run(drain, capture_output=True, text=True, timeout=120)
            assert result.returncode == 0, result.stderr
            assert node.node_id not in cluster.replica_nodes().values()
            cluster.kill_node(node)
            load.wait_for(16)
        assert all(each.is_complete for each in load.outcomes), [e for e in load.outcomes if not e.is_complete][:3]
        cluster.wait_for_replicas(2)
    finally:
        if node in cluster.nodes:
            cluster.kill_node(node)
        cluster.add_node()
