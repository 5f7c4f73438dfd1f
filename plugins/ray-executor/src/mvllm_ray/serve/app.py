"""build_app: the settings of an application as a Serve application."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from ray import serve
from ray.serve import Application

from mvllm.extension_api import ConfigError
from mvllm_ray.serve.ingress import Ingress
from mvllm_ray.serve.model_server import ModelServer
from mvllm_ray.serve.routing import ROUTER_CLASSES
from mvllm_ray.serve.settings import AppSettings, IngressSettings, Model, read_settings
from mvllm_ray.worker import own_version

_HEAD_NODE = "node:__internal_head__"
_STOP_SECONDS = 15.0
"""For the end of a server, after its requests have ended."""


def build_app(args: dict[str, Any]) -> Application:
    """Serve's application builder: `serve run mvllm_ray.serve:build_app model=demo`, or `args` of a Serve config file.

    Args:
        args: The settings. See the module `settings`.

    Raises:
        ConfigError: A setting is invalid.
    """
    return make_app(read_settings(args))


def make_app(settings: AppSettings) -> Application:
    """The application: one deployment for each model, and the ingress."""
    handles = [_model_deployment(model).bind(msgspec.to_builtins(model)) for model in settings.models]
    names = [model.names for model in settings.models]
    bound: Application = _ingress_deployment(settings.ingress, names).bind(
        names, msgspec.to_builtins(settings.ingress), *handles
    )
    return bound


def deployment_name(model: str) -> str:
    """The name of a model's deployment. Serve permits neither `#` nor `/` in it."""
    return "model-" + "".join(c if c.isalnum() or c in "-_." else "-" for c in model)


def _model_deployment(model: Model) -> Any:
    options: dict[str, Any] = {
        "name": deployment_name(model.name),
        "max_ongoing_requests": model.max_ongoing_requests,
        "max_queued_requests": model.max_queued_requests,
        "max_surge_percent": model.max_surge_percent,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": model.drain_timeout + _STOP_SECONDS,
        "health_check_period_s": 5,
        "health_check_timeout_s": 15,
        **_placement(model),
    }
    if model.max_replicas_per_node is not None:
        options["max_replicas_per_node"] = model.max_replicas_per_node
    if (router := ROUTER_CLASSES[model.routing]) is not None:
        options["request_router_config"] = {"request_router_class": router}
    if model.autoscaling is None:
        options["num_replicas"] = model.num_replicas
    else:
        scaling = msgspec.structs.asdict(model.autoscaling)
        target = scaling.pop("target_queue_seconds")
        if scaling["initial_replicas"] is None:
            del scaling["initial_replicas"]
        if target is not None:
            policy = "mvllm_ray.serve.autoscaling:QueueTimePolicy"
            scaling["policy"] = {"policy_function": policy, "policy_kwargs": {"target_queue_seconds": target}}
        options["autoscaling_config"] = scaling
    return serve.deployment(ModelServer).options(**options, **_version(model))


def _placement(model: Model) -> dict[str, Any]:
    if model.distributed is None:
        wanted = {key: value for key, value in msgspec.structs.asdict(model.resources).items() if value}
        return {"ray_actor_options": {"num_cpus": 0, **wanted}}
    if any(amount <= 0 for amount in model.distributed.worker.values()) or not model.distributed.worker:
        raise ConfigError(f"distributed.worker of the model {model.name!r} must name resources, such as {{GPU: 1}}.")
    return {
        "ray_actor_options": {"num_cpus": 0},  # the replica computes nothing: each bundle is for a worker
        "placement_group_bundles": [dict(model.distributed.worker) for _ in range(model.num_workers)],
        "placement_group_strategy": model.distributed.strategy,
    }


def _ingress_deployment(settings: IngressSettings, names: list[list[str]]) -> Any:
    resources = {"resources": {_HEAD_NODE: 0.001}} if settings.node == "head" else {}
    return serve.deployment(Ingress).options(
        name="ingress",
        num_replicas=settings.num_replicas,
        max_ongoing_requests=settings.max_ongoing_requests,
        max_surge_percent=100,
        ray_actor_options={"num_cpus": settings.num_cpus, **resources},
        graceful_shutdown_timeout_s=600,
        **_version(settings, names),
    )


def _version(*values: Any) -> dict[str, Any]:
    """The option `version`, which Serve does not document: it replaces the replicas of a deployment whose version has
    changed. Without it, `serve.run` replaces all replicas of the application, those of models that are as before, too.

    The number of replicas and how requests are routed are not part of it: they change without new replicas.
    """
    parts: list[Any] = [own_version()]
    for value in values:
        if isinstance(value, Model):
            content = msgspec.to_builtins(value)
            for name in (
                "aliases",
                "autoscaling",
                "max_queued_requests",
                "max_surge_percent",
                "num_replicas",
                "routing",
            ):
                content.pop(name, None)
            value = content
        parts.append(msgspec.to_builtins(value))
    digest = hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()
    return {"version": digest[:16], "_internal": True}
