"""What a Ray Serve application does without a cluster: settings, deployments, routing, autoscaling."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import ray.cloudpickle
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
from ray.serve.request_router import PendingRequest

from mvllm.extension_api import ConfigError
from mvllm_ray.serve import build_app, routing
from mvllm_ray.serve.app import _ingress_deployment, _model_deployment, deployment_name
from mvllm_ray.serve.autoscaling import QueueTime, QueueTimePolicy
from mvllm_ray.serve.cli import main, read_file
from mvllm_ray.serve.routing import (
    CHUNK,
    ForwardedRequest,
    PrefixAwareRouter,
    RoundRobinRouter,
    cache_root,
    prompt_units,
)
from mvllm_ray.serve.server_process import command
from mvllm_ray.serve.settings import IngressSettings, Model, read_settings

DEPLOYMENT = DeploymentID(name="model-demo", app_name="mvllm")


# --- settings


def test_a_single_model_can_be_given_as_texts() -> None:
    [model] = read_settings({"model": "org/name", "num_replicas": "2", "routing": "round_robin"}).models
    assert (model.name, model.model, model.num_replicas, model.routing) == ("org/name", "org/name", 2, "round_robin")


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({}, "needs a name"),
        ({"models": []}, "models is empty"),
        ({"model": "a", "replicas": 2}, "replicas"),
        ({"model": "a", "options": {"max-model-len": 8, "uds": "x"}}, "must not have uds"),
        ({"model": "a", "num_replicas": 0}, "at least 1"),
        ({"model": "a", "autoscaling": {"min_replicas": 3, "max_replicas": 2}}, "min_replicas is 3"),
        ({"model": "a", "autoscaling": {"target_queue_seconds": 0}}, "must be above 0"),
        ({"model": "a", "routing": "random"}, "routing"),
        ({"models": [{"name": "a"}, {"name": "b", "aliases": ["a"]}]}, "several models have the name a"),
        (
            {"model": "a", "distributed": {"worker": {"CPU": 1}}, "options": {"distributed-executor-backend": "mp"}},
            "needs distributed_executor_backend ray",
        ),
    ],
)
def test_wrong_settings_are_refused_with_their_name(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_settings(settings)


def test_adapters_that_the_options_load_are_names_of_the_model() -> None:
    model = Model("base", aliases=["other"], options={"lora-modules": ["sql=/adapters/sql", "law=/adapters/law"]})
    assert model.names == ["base", "other", "sql", "law"]


def test_a_file_that_cannot_be_read_is_an_error_of_the_command(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "app.yaml"
    assert main(["serve", str(path)]) == 1
    assert str(path) in capsys.readouterr().err
    path.write_text("models: [{name: demo, options: {max-model-len: 64}}]")
    assert read_file(str(path)).models[0].options == {"max-model-len": 64}


# --- deployments


def test_beside_another_projects_mvllm_the_command_says_so(tmp_path: Path) -> None:
    (tmp_path / "mvllm").mkdir()
    (tmp_path / "mvllm" / "__init__.py").write_text("__version__ = '0.1.0'\n")
    done = subprocess.run(
        [sys.executable, "-c", "from mvllm_ray.serve.cli import main; main()", "serve", "models.yaml"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "the package mvllm of this environment is another project's" in done.stderr


def options_of(**settings: Any) -> Any:
    return _model_deployment(msgspec.convert({"name": "demo", **settings}, Model))


def test_a_distributed_model_has_a_bundle_for_each_worker() -> None:
    deployment = options_of(
        options={"tensor-parallel-size": 2, "pipeline_parallel_size": 2, "data-parallel-size": 3},
        distributed={"worker": {"GPU": 1}, "strategy": "STRICT_PACK"},
    )
    config = deployment._replica_config
    assert config.placement_group_bundles == [{"GPU": 1}] * 12
    assert config.placement_group_strategy == "STRICT_PACK"
    assert config.ray_actor_options["num_cpus"] == 0  # every bundle is for a worker
    with pytest.raises(ConfigError, match="must name resources"):
        options_of(distributed={"worker": {}})


def test_resources_of_a_replica_are_rays() -> None:
    options = options_of(resources={"num_cpus": 2, "resources": {"accelerator": 1}})._replica_config.ray_actor_options
    assert options["num_cpus"] == 2 and options["resources"] == {"accelerator": 1} and not options.get("num_gpus")


def test_requests_in_progress_may_finish_before_a_replica_is_stopped() -> None:
    assert options_of(drain_timeout=100)._deployment_config.graceful_shutdown_timeout_s > 100


def test_only_a_change_of_what_runs_replaces_replicas() -> None:
    def version(**settings: Any) -> str:
        return str(options_of(**settings)._version)

    base = version()
    assert version(num_replicas=3) == version(routing="round_robin") == version(autoscaling={"max_replicas": 2}) == base
    changed = [version(version="2"), version(model="other"), version(options={"seed": 1}), version(drain_timeout=5)]
    assert len({base, *changed}) == 5
    names = [["demo"]]
    assert (
        _ingress_deployment(IngressSettings(), names)._version == _ingress_deployment(IngressSettings(), names)._version
    )
    assert (
        _ingress_deployment(IngressSettings(), [["x"]])._version
        != _ingress_deployment(IngressSettings(), names)._version
    )


def test_the_ingress_is_on_the_head_node_unless_it_may_be_anywhere() -> None:
    def resources(node: str) -> Any:
        settings = msgspec.convert({"node": node}, IngressSettings)
        return _ingress_deployment(settings, [["demo"]])._replica_config.ray_actor_options.get("resources")

    assert resources("head") == {"node:__internal_head__": 0.001} and not resources("any")


def test_names_of_deployments_have_no_separators() -> None:
    assert deployment_name("org/model#1") == "model-org-model-1"


def test_an_application_has_a_deployment_for_each_model() -> None:
    app = build_app({"models": [{"name": "a"}, {"name": "b"}]})
    assert app._bound_deployment.name == "ingress"
    names = [each._bound_deployment.name for each in app._bound_deployment.init_args[2:]]
    assert names == ["model-a", "model-b"]


# --- routing


class Replica:
    """As much of Serve's RunningReplica as routers use."""

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(unique_id=name, deployment_id=DEPLOYMENT)


def request_for(text: str, salt: str | None = None) -> ForwardedRequest:
    body = {"prompt": text, **({"cache_salt": salt} if salt else {})}
    request = ForwardedRequest("POST", "/v1/completions", [], msgspec.json.encode(body))
    request.prompt, request.root = prompt_units(body), cache_root(body, "demo")
    return request


class Routing:
    """A router of Serve with replicas, driven without a cluster."""

    def __init__(self, router_class: Any, *names: str) -> None:
        self.router = router_class.__new__(router_class)
        self.router.initialize_state()
        self.replicas = [Replica(name) for name in names]

    def choose(self, request: ForwardedRequest) -> list[str]:
        """The replicas in the order in which Serve asks them."""
        pending = SimpleNamespace(args=[request])
        ranks = asyncio.run(self.router.choose_replicas(self.replicas, pending))
        return [each.replica_id.unique_id for rank in ranks for each in rank]


def test_requests_that_begin_alike_go_to_one_replica_and_others_are_spread() -> None:
    driven = Routing(PrefixAwareRouter, "a", "b", "c")
    chosen: dict[str, set[str]] = {}
    for i in range(5):
        for beginning in ("apple ", "berry ", "cherry "):
            request = request_for(beginning * 200 + str(i))
            chosen.setdefault(beginning, set()).add(driven.choose(request)[0])
            request.first_output()
            request.finish()
    assert [len(each) for each in chosen.values()] == [1, 1, 1]
    assert set.union(*chosen.values()) == {"a", "b", "c"}


def test_the_copy_of_a_router_that_serve_makes_knows_the_requests_of_the_ingress() -> None:
    spec = importlib.util.spec_from_file_location("copy_of_routing", routing.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    copy = module.PrefixAwareRouter
    assert copy is not PrefixAwareRouter
    driven, request = Routing(copy, "a", "b"), request_for("apple " * 200)
    assert request.is_routed_to(driven.choose(request)[0])


def test_a_replica_that_is_too_busy_is_not_chosen_for_a_short_prefix() -> None:
    driven = Routing(PrefixAwareRouter, "a", "b")
    text = "apple " * 100
    busy = [request_for(text) for _ in range(30)]
    assert {driven.choose(each)[0] for each in busy} == {"a", "b"}


def test_all_replicas_are_offered_and_the_one_that_accepts_is_counted() -> None:
    driven = Routing(PrefixAwareRouter, "a", "b")
    request = request_for("apple " * 200)
    first, other = driven.choose(request)
    assert {first, other} == {"a", "b"}
    accepted = ReplicaID(unique_id=other, deployment_id=DEPLOYMENT)
    driven.router.on_request_routed(SimpleNamespace(args=[request]), accepted, None)
    assert request.is_routed_to(other)
    request.finish()
    assert not request.is_routed_to(other)


def test_requests_with_different_salts_share_nothing() -> None:
    assert cache_root({"cache_salt": "a"}, "demo") != cache_root({"cache_salt": "b"}, "demo")
    assert cache_root({}, "adapter") != cache_root({}, "demo") == cache_root({"prompt": "x"}, "demo")


def test_each_replica_has_its_turn() -> None:
    driven = Routing(RoundRobinRouter, "a", "b", "c")
    assert sorted(driven.choose(request_for("x"))[0] for _ in range(6)) == ["a", "a", "b", "b", "c", "c"]


@pytest.mark.parametrize(
    "body, longer",
    [
        ({"prompt": "abcd" * 100}, {"prompt": "abcd" * 100 + "more text"}),
        ({"prompt": list(range(100))}, {"prompt": list(range(120))}),
        (
            {"messages": [{"role": "user", "content": "abcd" * 100}]},
            {"messages": [{"role": "user", "content": "abcd" * 100}, {"role": "assistant", "content": "yes"}]},
        ),
        (
            {"system": "abcd" * 100, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
            {"system": "abcd" * 100, "messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]},
        ),
        ({"instructions": "abcd" * 100, "input": "a"}, {"instructions": "abcd" * 100, "input": "another"}),
    ],
    ids=["text", "ids", "messages", "system", "responses"],
)
def test_a_prompt_that_grows_keeps_its_units(body: dict[str, Any], longer: dict[str, Any]) -> None:
    units, more = prompt_units(body), prompt_units(longer)
    whole = len(units) // CHUNK * CHUNK
    assert whole and list(units[:whole]) == list(more[:whole])


@pytest.mark.parametrize(
    "body", [None, [], "text", {}, {"prompt": 3}, {"messages": [None, {"content": 5}]}, {"input": [[]]}]
)
def test_bodies_without_a_prompt_have_no_units(body: Any) -> None:
    assert list(prompt_units(body)) == []


def test_a_replica_gets_the_request_without_what_the_router_used() -> None:
    request = request_for("apple " * 500)
    # As Ray copies the arguments of a call; the data are the test's own.
    copy = ray.cloudpickle.loads(ray.cloudpickle.dumps(request))
    assert (copy.method, copy.target, copy.body) == (request.method, request.target, request.body)
    assert len(request.prompt) > 0 and len(copy.prompt) == 0


def test_serve_has_what_the_routers_override() -> None:
    """The names that Serve calls; a version of Ray without them would ignore the routers' choice."""
    from ray.serve._private.request_router.request_router import RequestRouter

    for name in (
        "initialize_state",
        "update_replicas",
        "on_replica_actor_died",
        "choose_replicas",
        "on_request_routed",
    ):
        assert hasattr(RequestRouter, name), name
    assert {"args", "metadata"} <= set(PendingRequest.__dataclass_fields__)
    assert DeploymentHandleSource.REPLICA


# --- autoscaling


def wanted(current: int, *, requests: float = 0, waits: tuple[float, ...] = ()) -> float:
    context = SimpleNamespace(
        current_num_replicas=current,
        target_num_replicas=current,
        total_num_requests=requests,
        aggregated_metrics={"queue_seconds": dict(enumerate(waits))},
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 10),
    )
    return QueueTimePolicy(target_queue_seconds=2.0)(context)[0]


def test_ongoing_requests_give_the_number_of_replicas_while_queues_are_short() -> None:
    assert wanted(2, requests=40, waits=(0.1, 0.2)) == 4
    assert wanted(4, requests=10, waits=(0.1,)) == 1


def test_a_long_queue_adds_replicas_and_a_shorter_one_keeps_them() -> None:
    assert wanted(2, requests=10, waits=(3.0, 0.1)) == 3
    assert wanted(2, requests=10, waits=(60.0,)) == 4  # at most twice as many in one decision
    assert wanted(4, requests=10, waits=(1.5,)) == 4
    assert wanted(0, requests=10) == 0


def test_a_queue_that_does_not_move_is_a_long_one() -> None:
    queue = QueueTime(now=0.0)
    assert queue.update(0.0, 0, num_waiting=0, now=5.0) == 0.0
    assert queue.update(3.0, 2, num_waiting=4, now=6.0) == 1.5
    assert queue.update(3.0, 2, num_waiting=4, now=6.5) == 1.5  # none was scheduled: as before
    assert queue.update(3.0, 2, num_waiting=4, now=10.0) == 4.0  # all wait since 6.0
    assert queue.update(13.0, 4, num_waiting=2, now=11.0) == 5.0
    assert queue.update(13.0, 4, num_waiting=0, now=12.0) == 0.0
    assert queue.update(13.0, 4, num_waiting=1, now=12.5) == 0.5


# --- the server's process


def test_the_servers_process_becomes_mvllm() -> None:
    result = subprocess.run(command(["serve", "--help"]), capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and result.stdout.startswith("usage: mvllm serve")


def test_a_server_whose_replica_has_ended_does_not_start() -> None:
    words = command(["serve", "--help"])
    words[3] = "1" if os.getppid() != 1 else "2"
    result = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1 and "has ended" in result.stderr
