"""The files in docs/deploy/ refer to files, options, metrics and limits that exist."""

from __future__ import annotations

import functools
import http.server
import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from mvllm.entrypoints.cli import main, serve
from mvllm.entrypoints.cli.config_file import expand_config
from mvllm.entrypoints.openai.server.settings import ServerSettings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs" / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("*.Dockerfile"))
EXAMPLE = "/etc/mvllm/serve.yaml"
SERVICE = DEPLOY / "systemd" / "mvllm.service"
METRICS = {
    name: (kind, set(re.findall(r"`(\w+)`", labels)))
    for name, kind, labels in re.findall(
        r"^\| `([\w:]+)` \| (\w+) \| ([^|]*) \|", (ROOT / "docs/reference/metrics.md").read_text(), flags=re.MULTILINE
    )
}
SCRAPED = {"job", "instance"}  # labels that Prometheus adds
for_each_image = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """Instructions of a Dockerfile with their arguments, as (name, arguments); continued lines are joined."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def served_with(arguments: list[str]) -> Any:
    """The parsed options of `mvllm serve`; docs/deploy/serve.yaml is read in place of the installed config file."""
    parser = main._make_parser("serve", serve)
    there = [argument.replace(EXAMPLE, str(DEPLOY / "serve.yaml")) for argument in arguments]
    return parser.parse_args(expand_config(parser, there))


class TestImages:
    @for_each_image
    def test_copied_files_exist_and_are_sent_to_the_builder(self, path: Path) -> None:
        sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
        lines = [words.split() for name, words in instructions(path) if name == "COPY" and "--from" not in words]
        sources = [source for words in lines for source in words[:-1]]
        assert sources
        for source in sources:
            assert (ROOT / source).exists(), source
            assert any(source == each or source.startswith(f"{each}/") for each in sent), source

    @for_each_image
    def test_installed_folders_are_distributions(self, path: Path) -> None:
        commands = " ".join(words for name, words in instructions(path) if name == "RUN")
        folders = re.findall(r"\./(platforms/[\w-]+)", commands)
        assert folders and all((ROOT / folder / "pyproject.toml").exists() for folder in folders)

    @for_each_image
    def test_it_serves_as_another_user_than_root_with_a_volume_and_a_health_check(self, path: Path) -> None:
        found = dict(instructions(path))
        assert found["USER"].isdecimal() and found["USER"] != "0"
        assert found["VOLUME"] == "/models" and found["ENV"].count("=/models/") == 2
        assert json.loads(found["ENTRYPOINT"]) == ["mvllm"]
        args = served_with(json.loads(found["CMD"]))
        assert args.host == "0.0.0.0" and str(args.port) == found["EXPOSE"]
        checked = json.loads(re.search(r"CMD (\[.*\])", found["HEALTHCHECK"])[1])  # type: ignore[index]
        assert f"docs/deploy/healthcheck.py {checked[-1]}" in path.read_text()

    @for_each_image
    def test_none_names_a_registry(self, path: Path) -> None:
        assert not re.search(r"https?://|\.(com|org|io)\b", path.read_text())

    @pytest.mark.parametrize("status, healthy", [(200, True), (503, False)])
    def test_the_health_check_is_the_servers_readiness(self, status: int, healthy: bool) -> None:
        asked = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                self.send_response(status)
                self.end_headers()

        with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
            threading.Thread(target=server.handle_request, daemon=True).start()
            result = run_health_check(server.server_port)
        assert (result.returncode == 0) is healthy and asked == ["/health/ready"]
        assert run_health_check(server.server_port).returncode != 0  # nothing listens there now


def run_health_check(port: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", DEPLOY / "healthcheck.py"]
    return subprocess.run(command, env={"HEALTHCHECK_PORT": str(port)}, capture_output=True, text=True, timeout=120)


class TestCompose:
    services = functools.cached_property(lambda self: read_yaml(DEPLOY / "compose.yaml")["services"])

    def test_mounted_files_exist_and_named_volumes_are_declared(self) -> None:
        declared = read_yaml(DEPLOY / "compose.yaml")["volumes"]
        for service in self.services.values():
            for mount in service["volumes"]:
                source = mount.split(":")[0]
                assert (DEPLOY / source).exists() if source.startswith(".") else source in declared, mount
        build = self.services["mvllm"]["build"]
        assert (DEPLOY / build["context"] / build["dockerfile"]).exists()
        assert f"serve.yaml:{EXAMPLE}:ro" in " ".join(self.services["mvllm"]["volumes"])

    def test_only_this_machine_can_connect(self) -> None:
        ports = [port for service in self.services.values() for port in service["ports"]]
        assert len(ports) == 3 and all(port.startswith("127.0.0.1:") for port in ports)

    def test_requests_in_flight_may_finish_before_the_container_is_killed(self) -> None:
        grace = float(self.services["mvllm"]["stop_grace_period"].removesuffix("s"))
        assert grace > ServerSettings().shutdown_timeout

    def test_prometheus_scrapes_the_server_and_grafana_reads_prometheus(self) -> None:
        prometheus = read_yaml(DEPLOY / "prometheus" / "prometheus.yaml")
        assert all((DEPLOY / "prometheus" / name).exists() for name in prometheus["rule_files"])
        [job] = prometheus["scrape_configs"]
        assert job["static_configs"] == [{"targets": ["mvllm:8000"]}] and "mvllm" in self.services
        provisioning = DEPLOY / "grafana" / "provisioning"
        [source] = read_yaml(provisioning / "datasources" / "prometheus.yaml")["datasources"]
        assert source["url"] == "http://prometheus:9090" and "prometheus" in self.services
        [provider] = read_yaml(provisioning / "dashboards" / "mvllm.yaml")["providers"]
        mounts = " ".join(self.services["grafana"]["volumes"])
        assert f"grafana-dashboard.json:{provider['options']['path']}/grafana-dashboard.json:ro" in mounts


class TestMetrics:
    """Names and labels of the dashboard are compared with a running server in tests/e2e/server/test_dashboard.py."""

    rules = read_yaml(DEPLOY / "prometheus" / "alerts.yaml")["groups"][0]["rules"]

    @pytest.mark.parametrize("rule", rules, ids=lambda rule: rule["alert"])
    def test_metrics_and_labels_of_an_alert_exist(self, rule: dict[str, Any]) -> None:
        expression = rule["expr"]
        names = re.findall(r"mvllm:\w+", expression)
        assert names or expression.startswith("up{")
        known = set.intersection(*map(labels_of, names)) - {"le"} if names else SCRAPED
        for name, selector in re.findall(r"(mvllm:\w+)\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)=", selector)) <= labels_of(name)
        grouped = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
        assert grouped - {"le"} <= known
        shown = re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"]))
        assert shown and set(shown) <= (grouped or known)

    def test_the_dashboard_has_only_metrics_of_the_reference(self) -> None:
        names = re.findall(r"mvllm:\w+", (ROOT / "docs" / "grafana-dashboard.json").read_text())
        assert names
        for name in set(names):
            labels_of(name)


def labels_of(sample: str) -> set[str]:
    """The labels of a sample on /metrics, by the reference page; fails if the page lacks it."""
    family = sample
    if sample not in METRICS:
        family, _, suffix = sample.rpartition("_")
        assert family in METRICS and METRICS[family][0] == "histogram" and suffix in ("bucket", "sum", "count"), sample
    return METRICS[family][1] | SCRAPED | ({"le"} if sample.endswith("_bucket") else set())


class TestService:
    def test_the_command_is_understood_and_gets_time_to_end(self) -> None:
        text = SERVICE.read_text()
        program, *arguments = shlex.split(re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)[1])  # type: ignore[index]
        assert program == "/opt/mvllm/bin/mvllm" and served_with(arguments).model == "demo"
        seconds = re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[1]  # type: ignore[index]
        assert float(seconds) > ServerSettings().shutdown_timeout

    @pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
    def test_systemd_accepts_the_unit(self, tmp_path: Path) -> None:
        unit = tmp_path / SERVICE.name
        unit.write_text(SERVICE.read_text().replace("/opt/mvllm/bin/mvllm", shutil.which("true") or "/bin/true"))
        result = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=120)
        assert (result.returncode, result.stderr) == (0, "")
