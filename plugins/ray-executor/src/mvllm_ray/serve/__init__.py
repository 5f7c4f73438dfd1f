"""A Ray Serve application: replicas of mvllm's OpenAI server on the nodes of a Ray cluster. Needs the extra `serve`.

    client -> Serve's HTTP proxy -> Ingress -> router of a model -> ModelServer (a replica) -> `mvllm serve`

settings.py        the settings of an application, as in a configuration file
app.py             build_app: settings -> Serve application
ingress.py         chooses the model, repeats requests of lost replicas, answers what concerns all models
routing.py         choose the replica of a request: by cached prefixes, or in turn
model_server.py    a replica: starts `mvllm serve` and forwards requests to it
server_process.py  the process of a replica's server
autoscaling.py     number of replicas by the time that requests wait
cli.py             `mvllm-ray serve FILE`
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`build_app`, the import path `mvllm_ray.serve:build_app` of Serve. Ray Serve is imported on first use."""
    if name == "build_app":
        from mvllm_ray.serve.app import build_app

        return build_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
