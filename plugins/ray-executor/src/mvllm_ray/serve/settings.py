"""The settings of an application: models with their replicas, and the ingress.

    models:
      - name: qwen                    # the `model` of requests
        model: Qwen/Qwen3-8B          # what `mvllm serve` is given
        options: {max-model-len: 8192}
        autoscaling: {min_replicas: 1, max_replicas: 8, target_ongoing_requests: 32}
        resources: {num_gpus: 1}

docs/how-to/ray-serve.md describes every setting. Unknown names are errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from mvllm.extension_api import ConfigError

Routing = Literal["prefix", "round_robin", "power_of_two"]
"""How the replica of a request is chosen. See the module `routing`."""

RESERVED_OPTIONS = frozenset({"config", "host", "model", "models", "models_dir", "port", "served_model_name", "uds"})
"""Options of `mvllm serve` that a replica sets itself."""
RAY_BACKEND = "ray"


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Ray's resources of one replica whose workers are processes on its node.

    Attributes:
        num_cpus, num_gpus: Ray's own resources.
        memory: Bytes.
        resources: Other resources, by Ray's names; such as those of accelerators that Ray does not know.
        accelerator_type: Ray's name of a type of accelerator.
    """

    num_cpus: float = 1
    num_gpus: float = 0
    memory: float | None = None
    resources: dict[str, float] = {}
    accelerator_type: str | None = None


class Distributed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A replica whose workers are Ray actors, which may be on several nodes.

    Attributes:
        worker: Ray's resources of one worker: a bundle of the replica's placement group, such as {GPU: 1}.
        strategy: Strategy of the placement group.
    """

    worker: dict[str, float]
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"


class Autoscaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The number of replicas follows the load.

    Attributes:
        min_replicas, max_replicas: Limits; with 0 replicas the first request waits for the start of one.
        initial_replicas: At the start; None for min_replicas.
        target_ongoing_requests: Requests that each replica should have in progress.
        target_queue_seconds: Replicas are added while requests wait longer than this for their first step; None to
            consider ongoing requests only.
        upscale_delay_s, downscale_delay_s: Seconds for which a change must be wanted.
        metrics_interval_s, look_back_period_s: How often replicas report their load, and over how long it is averaged.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    initial_replicas: int | None = None
    target_ongoing_requests: float = 16
    target_queue_seconds: float | None = None
    upscale_delay_s: float = 10
    downscale_delay_s: float = 300
    metrics_interval_s: float = 2
    look_back_period_s: float = 10

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas or self.max_replicas < 1:
            raise ValueError(
                f"min_replicas is {self.min_replicas} and max_replicas {self.max_replicas}; "
                "they must be 0 <= min_replicas <= max_replicas, with max_replicas at least 1"
            )
        queue_seconds = 1.0 if self.target_queue_seconds is None else self.target_queue_seconds
        if self.target_ongoing_requests <= 0 or queue_seconds <= 0:
            raise ValueError("target_ongoing_requests and target_queue_seconds must be above 0")


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One model and its replicas.

    Attributes:
        name: The `model` of requests.
        model: A folder, a file, or a name on the hub; by default `name`.
        aliases: More names for requests.
        options: Options of `mvllm serve` by their names, as in its `--config` file.
        num_replicas: Number of replicas, without autoscaling.
        autoscaling: None for a fixed number.
        resources: Of one replica; not with `distributed`.
        distributed: Workers as Ray actors; None for processes on the replica's node.
        environment: Environment variables of the server.
        routing: How the replica of a request is chosen.
        max_ongoing_requests: Requests that one replica has in progress at once; more wait in the ingress.
        max_queued_requests: Requests that may wait in the ingress; more are refused with 503. -1 for no limit.
        max_replicas_per_node: None for no limit.
        max_surge_percent: Replicas that a change of the model may start before it stops old ones, in percent of the
            number of replicas. With 0 an old replica is stopped first, and its resources are used again.
        start_timeout: Seconds for the start of a replica.
        drain_timeout: Seconds for requests in progress when a replica is stopped.
        version: Anything; a change replaces the replicas, for weights that have changed under the same name.
    """

    name: str
    model: str = ""
    aliases: list[str] = []
    options: dict[str, Any] = {}
    num_replicas: int = 1
    autoscaling: Autoscaling | None = None
    resources: Resources = Resources()
    distributed: Distributed | None = None
    environment: dict[str, str] = {}
    routing: Routing = "prefix"
    max_ongoing_requests: int = 256
    max_queued_requests: int = -1
    max_replicas_per_node: int | None = None
    max_surge_percent: int = 0
    start_timeout: float = 1800
    drain_timeout: float = 60
    version: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a model needs a name")
        reserved = sorted({key.replace("-", "_") for key in self.options} & RESERVED_OPTIONS)
        if reserved:
            raise ValueError(
                f"options of the model {self.name!r} must not have {', '.join(reserved)}: a replica sets it"
            )
        if self.num_replicas < 1 or self.max_ongoing_requests < 1:
            raise ValueError(f"num_replicas and max_ongoing_requests of the model {self.name!r} must be at least 1")
        if self.distributed is not None and self.option("distributed_executor_backend", RAY_BACKEND) != RAY_BACKEND:
            raise ValueError(f"the model {self.name!r} is distributed, which needs distributed_executor_backend ray")

    @property
    def names(self) -> list[str]:
        """All names for requests: of the model, and of the LoRA adapters that `options` load."""
        adapters = self.option("lora_modules", [])
        adapters = [adapters] if isinstance(adapters, str) else adapters
        return [self.name, *self.aliases, *(str(each).partition("=")[0] for each in adapters)]

    @property
    def num_workers(self) -> int:
        """Workers of one server, with those of its data-parallel replicas."""
        return math.prod(int(self.option(f"{kind}_parallel_size", 1)) for kind in ("tensor", "pipeline", "data"))

    def option(self, name: str, default: Any) -> Any:
        """The value of an option, whose name may be written with `-` or `_`."""
        return next((value for key, value in self.options.items() if key.replace("-", "_") == name), default)


class IngressSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The ingress: what is between Serve's HTTP proxy and the replicas.

    Attributes:
        num_replicas: Its replicas. Each has its own view of which replica has cached what.
        num_cpus: Of one replica.
        node: `head`: on the head node, so that the loss of another node ends no request that is computed elsewhere.
            `any`: where Ray places it.
        max_ongoing_requests: Requests of one replica of the ingress.
        retries: How often a request is sent to another replica if the first one is lost before it has answered.
        max_body_bytes: Longest request body.
    """

    num_replicas: int = 1
    num_cpus: float = 0
    node: Literal["head", "any"] = "head"
    max_ongoing_requests: int = 10_000
    retries: int = 1
    max_body_bytes: int = 32 << 20


class AppSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An application.

    Attributes:
        models: The models. Requests that name none go to the first.
        ingress: The ingress.
    """

    models: list[Model]
    ingress: IngressSettings = IngressSettings()

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models is empty; an application needs at least one model")
        names = [name for model in self.models for name in model.names]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"several models have the name {', '.join(repeated)}")


def read_settings(values: Mapping[str, Any]) -> AppSettings:
    """The settings of an application.

    Args:
        values: `models` and `ingress`; or the settings of a single model, as `serve run mvllm_ray.serve:build_app
            model=...` passes them, whose values may be texts.

    Raises:
        ConfigError: A setting is unknown or invalid; the message names it.
    """
    content = dict(values)
    if "models" not in content:
        ingress = content.pop("ingress", {})
        content.setdefault("name", content.get("model", ""))
        content = {"models": [content], "ingress": ingress}
    try:
        return msgspec.convert(content, AppSettings, strict=False)
    except (msgspec.ValidationError, ValueError) as e:
        raise ConfigError(f"The settings of the Ray Serve application are invalid: {e}.") from e
