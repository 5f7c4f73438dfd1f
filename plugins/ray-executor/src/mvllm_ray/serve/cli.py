"""The command `mvllm-ray`: `serve FILE` runs an application on a Ray cluster, `drain` empties a node.

Repeated with a changed file, `serve` changes the running application: replicas of changed models are replaced, a few at
a time, and requests in progress finish.

Before a node is stopped, `drain` asks Ray to use it no more: Serve starts replicas on other nodes, then stops those of
the node when their requests have ended.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

try:
    from mvllm.extension_api import ConfigError, MvllmError, install_command
except ModuleNotFoundError as e:
    if e.name != "mvllm.extension_api":
        raise
    sys.exit(  # the module is imported by the command, which has nobody else to tell
        "mvllm-ray belongs to the inference engine mvllm, but the package mvllm of this environment is another "
        "project's, which has this name on the public package index. Make a new environment, and install the engine "
        "there as its page docs/how-to/install.md says."
    )
from mvllm_ray.serve.settings import AppSettings, read_settings


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    parser = argparse.ArgumentParser(prog="mvllm-ray", description="mvllm on a Ray cluster.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve the models of a configuration file with Ray Serve")
    serve.add_argument("file", help="YAML file with `models` and `ingress`")
    serve.add_argument(
        "--address", help="address of the Ray cluster. Default: RAY_ADDRESS, a cluster on this machine, or a new one"
    )
    serve.add_argument("--host", default="127.0.0.1", help="address of Serve's HTTP proxies. Default: 127.0.0.1")
    serve.add_argument("--port", type=int, default=8000, help="port of Serve's HTTP proxies. Default: 8000")
    serve.add_argument(
        "--proxies",
        choices=("head", "every"),
        default="every",
        help="nodes with an HTTP proxy: the head node, or every node that has a replica. Default: every",
    )
    serve.add_argument("--name", default="mvllm", help="name of the Serve application. Default: mvllm")
    serve.add_argument("--detach", action="store_true", help="return when the application runs")
    drain = commands.add_parser("drain", help="move the replicas of a node to others, and wait until it has none")
    drain.add_argument("--address", default="auto", help="address of the Ray cluster. Default: that of this node")
    drain.add_argument("--node-id", help="id of the node. Default: this one")
    drain.add_argument("--timeout", type=float, default=90, metavar="S", help="seconds to wait. Default: 90")
    args = parser.parse_args(argv)
    try:
        return drain_node(args) if args.command == "drain" else run(read_file(args.file), args)
    except MvllmError as e:
        sys.stderr.write(f"mvllm-ray: {e}\n")
        return 1


def read_file(path: str) -> AppSettings:
    """The settings in a file.

    Raises:
        ConfigError: It cannot be read, or a setting is invalid.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as e:
        raise ConfigError(f"{path} cannot be read: {e}") from e
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must be a YAML mapping with `models`.")
    return read_settings(content)


def run(settings: AppSettings, args: argparse.Namespace) -> int:
    """Runs or changes the application; with `--detach` returns when it runs, otherwise at a signal."""
    try:
        from ray import serve

        from mvllm_ray.serve.app import make_app
    except ImportError as e:
        raise ConfigError(f"Ray Serve cannot be imported ({e}). Run: {install_command('mvllm-ray[serve]')}") from e
    app = make_app(settings)
    _connect(args.address)
    location: Any = "HeadOnly" if args.proxies == "head" else "EveryNode"
    serve.start(proxy_location=location, http_options={"host": args.host, "port": args.port})
    serve.run(app, name=args.name, route_prefix="/")
    sys.stdout.write(f"Ready at http://{args.host}:{args.port}\n")
    sys.stdout.flush()
    if args.detach:
        return 0
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *unused: stop.set())
    while not stop.wait(1.0):
        pass
    serve.delete(args.name)
    return 0


def drain_node(args: argparse.Namespace) -> int:
    """Empties a node. Returns 0 when it has no replica, 1 if it still has one after the timeout."""
    import ray
    from ray.core.generated import autoscaler_pb2
    from ray.serve.context import _get_global_client

    _connect(args.address)
    node = args.node_id or ray.get_runtime_context().get_node_id()
    client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    deadline = time.time() + args.timeout
    accepted, reason = client.drain_node(
        node,
        autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
        "mvllm-ray drain",
        int(deadline * 1000),
    )
    if not accepted:
        raise ConfigError(f"Ray does not drain the node {node}: {reason}")

    def count_replicas() -> int:
        controller = _get_global_client(raise_if_no_controller_running=False)
        apps = {} if controller is None else controller.get_serve_details()["applications"]
        deployments = [each for app in apps.values() for each in app["deployments"].values()]
        return sum(replica.get("node_id") == node for each in deployments for replica in each["replicas"])

    while count := count_replicas():
        if time.time() > deadline:
            sys.stderr.write(f"mvllm-ray: {count} replicas are left on the node after {args.timeout:g} s.\n")
            return 1
        time.sleep(0.5)
    return 0


def _connect(address: str | None) -> None:
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, include_dashboard=None if address else False, namespace="serve", log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as e:
        raise ConfigError(f"The Ray cluster at {address or 'RAY_ADDRESS'} cannot be reached: {e}") from e


if __name__ == "__main__":
    sys.exit(main())
