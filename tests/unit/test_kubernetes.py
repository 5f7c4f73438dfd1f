"""The manifests and the chart in docs/deploy/kubernetes: valid objects, which fit the server and each other.

Helm's own library renders the chart; the schemas are those of Kubernetes.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.unit.test_deploy import METRICS, served_with

KUBERNETES = Path(__file__).parents[2] / "docs" / "deploy" / "kubernetes"
CHART = KUBERNETES / "chart"
OLDEST, NEWEST = "1.27", kubernetes_validate.latest_version()
"""The versions that objects are checked with; the oldest one is that of Chart.yaml."""

ALL_ON: dict[str, Any] = {
    "model": "org/model",
    "options": {"max-model-len": 4096, "enable-prefix-caching": True},
    "env": [{"name": "OMP_NUM_THREADS", "value": "4"}],
    "apiKeySecret": "keys",
    "hubTokenSecret": "hub",
    "device": {"resource": "example.com/accelerator", "count": 2},
    "modelCache": {"enabled": True, "storageClassName": "shared"},
    "kvDiskCache": {"enabled": True, "sizeGiB": 40, "storageClassName": "fast"},
    "autoscaling": {"enabled": True},
    "nodeSelector": {"pool": "accelerators"},
    "tolerations": [{"key": "accelerator", "operator": "Exists"}],
}


def helm() -> Any:
    """Helm's library. It starts threads when it is imported, and a process with threads can't fork the test workers."""
    import helm_python

    return helm_python


def render(values: dict[str, Any], release: str = "demo") -> dict[str, dict[str, Any]]:
    """The objects of the chart by their kind (and name, for claims)."""
    with helm().Chart.load(str(CHART)) as chart:
        files = chart.render(values, name=release, namespace="prod")
    objects = [each for text in files.values() if "kind:" in text for each in yaml.safe_load_all(text) if each]
    return by_kind(objects)


def by_kind(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    claim = "PersistentVolumeClaim"
    named = {each["kind"] + ("/" + each["metadata"]["name"] if each["kind"] == claim else ""): each for each in objects}
    assert len(named) == len(objects)
    return named


def plain() -> dict[str, dict[str, Any]]:
    return by_kind(list(yaml.safe_load_all((KUBERNETES / "deployment.yaml").read_text())))


def validate(objects: dict[str, dict[str, Any]]) -> None:
    for each in objects.values():
        for version in (OLDEST, NEWEST):
            kubernetes_validate.validate(each, version, strict=True)


def pod(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = objects["Deployment"]["spec"]["template"]["spec"]
    return spec


def container(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    [found] = pod(objects)["containers"]
    assert isinstance(found, dict)
    return found


def served(objects: dict[str, dict[str, Any]], tmp_path: Path) -> Any:
    """The options that the container serves with, parsed by `mvllm serve`."""
    options = yaml.safe_load(objects["ConfigMap"]["data"]["serve.yaml"])
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(options))
    arguments = container(objects)["args"]
    assert arguments[1:] == ["--config", "/etc/mvllm/serve.yaml"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container(objects)["volumeMounts"]}
    [volume] = [each for each in pod(objects)["volumes"] if each["name"] == mounts["/etc/mvllm"]]
    assert volume["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]
    return served_with([arguments[0], "--config", str(path)])


VARIANTS = {
    "defaults": {},
    "all": ALL_ON,
    "claim": {"kvDiskCache": {"enabled": True, "kind": "claim"}, "preStopSeconds": 0, "shutdownTimeoutSeconds": 5},
}
for_each = pytest.mark.parametrize("objects", ["plain", *VARIANTS], indirect=True)


@cache
def objects_of(variant: str) -> dict[str, dict[str, Any]]:
    return plain() if variant == "plain" else render(VARIANTS[variant])


@pytest.fixture
def objects(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    return objects_of(request.param)


class TestObjects:
    @for_each
    def test_they_are_valid_in_the_oldest_and_the_newest_version(self, objects: dict[str, dict[str, Any]]) -> None:
        validate(objects)

    @for_each
    def test_probes_ask_the_servers_endpoints(self, objects: dict[str, dict[str, Any]]) -> None:
        found = container(objects)
        [port] = found["ports"]
        for name, path in (("startup", "ready"), ("readiness", "ready"), ("liveness", "live")):
            probe = found[f"{name}Probe"]
            assert probe["httpGet"] == {"path": f"/health/{path}", "port": port["name"]}
            assert probe["timeoutSeconds"] >= 5  # a busy machine may be slow
        # The engine counts as hung before the container is restarted, and not after one missed probe.
        assert found["livenessProbe"]["failureThreshold"] > 1
        startup = found["startupProbe"]
        limit = objects["Deployment"]["spec"]["progressDeadlineSeconds"]
        assert 1800 <= startup["periodSeconds"] * startup["failureThreshold"] < limit

    @for_each
    def test_requests_in_progress_end_before_the_pod_is_killed(
        self, objects: dict[str, dict[str, Any]], tmp_path: Path
    ) -> None:
        args = served(objects, tmp_path)
        lifecycle = container(objects).get("lifecycle")
        before_stop = float(lifecycle["preStop"]["exec"]["command"][1]) if lifecycle else 0.0
        assert args.shutdown_timeout > 0
        assert pod(objects)["terminationGracePeriodSeconds"] > before_stop + args.shutdown_timeout

    @for_each
    def test_ports_and_selectors_belong_together(self, objects: dict[str, dict[str, Any]], tmp_path: Path) -> None:
        args = served(objects, tmp_path)
        [port] = container(objects)["ports"]
        assert (args.host, args.port) == ("0.0.0.0", port["containerPort"])
        [service_port] = objects["Service"]["spec"]["ports"]
        assert service_port["targetPort"] == port["name"]
        template = objects["Deployment"]["spec"]["template"]["metadata"]
        assert template["annotations"]["prometheus.io/port"] == str(port["containerPort"])
        selectors = [
            objects["Deployment"]["spec"]["selector"]["matchLabels"],
            objects["Service"]["spec"]["selector"],
            objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        ]
        for selector in selectors:
            assert selector and selector.items() <= template["labels"].items()

    @for_each
    def test_every_mounted_volume_and_claim_exists(self, objects: dict[str, dict[str, Any]]) -> None:
        volumes = {volume["name"]: volume for volume in pod(objects)["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container(objects)["volumeMounts"]}
        assert volumes.keys() == mounts.keys()
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory" and mounts["shm"] == "/dev/shm"
        assert mounts["models"] == "/models"  # the images keep models there
        for volume in volumes.values():
            if claim := volume.get("persistentVolumeClaim"):
                assert f"PersistentVolumeClaim/{claim['claimName']}" in objects

    @for_each
    def test_the_server_is_not_root_and_has_no_capabilities(self, objects: dict[str, dict[str, Any]]) -> None:
        assert pod(objects)["securityContext"]["runAsNonRoot"] is True
        assert container(objects)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        assert pod(objects)["automountServiceAccountToken"] is False

    @for_each
    def test_an_autoscaler_and_a_fixed_number_of_replicas_exclude_each_other(
        self, objects: dict[str, dict[str, Any]]
    ) -> None:
        scaler, deployment = objects.get("HorizontalPodAutoscaler"), objects["Deployment"]
        assert (scaler is None) == ("replicas" in deployment["spec"])
        if scaler is not None:
            target = scaler["spec"]["scaleTargetRef"]
            assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment["metadata"]["name"]}


class TestMetrics:
    rules = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())["rules"]["custom"]

    @pytest.mark.parametrize("objects", ["plain", "all"], indirect=True)
    def test_the_autoscaler_uses_metrics_of_the_adapter(self, objects: dict[str, dict[str, Any]]) -> None:
        metrics = objects["HorizontalPodAutoscaler"]["spec"]["metrics"]
        used = [each["pods"]["metric"]["name"] for each in metrics]
        assert used[0] == "mvllm_queue_time_seconds"
        assert set(used) == {rule["name"]["as"] for rule in self.rules}

    @pytest.mark.parametrize("rule", rules, ids=lambda rule: rule["name"]["as"])
    def test_the_adapter_reads_metrics_of_the_server(self, rule: dict[str, Any]) -> None:
        names = re.findall(r"mvllm:\w+", rule["metricsQuery"] + rule["seriesQuery"])
        assert names
        for name in names:
            kind = METRICS[name][0] if name in METRICS else METRICS[re.sub(r"_(sum|count)$", "", name)][0]
            assert kind == ("gauge" if name in METRICS else "histogram")
        assert rule["metricsQuery"].count("<<.LabelMatchers>>") == rule["metricsQuery"].count("<<.GroupBy>>")


class TestChart:
    def test_it_has_no_lint_errors(self) -> None:
        found = helm().lint(str(CHART))
        assert not found["errors"] and found["total_charts_linted"] == 1
        assert [each["error"] for each in found["messages"]] == ["icon is recommended"]

    def test_the_oldest_version_is_the_charts(self) -> None:
        assert yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"] == f">={OLDEST}.0-0"

    def test_defaults_are_one_server_without_autoscaler_and_claims(self) -> None:
        assert set(objects_of("defaults")) == {"ConfigMap", "Deployment", "PodDisruptionBudget", "Service"}
        assert set(render({"podDisruptionBudget": {"enabled": False}})) == {"ConfigMap", "Deployment", "Service"}

    def test_values_reach_the_server(self, tmp_path: Path) -> None:
        objects = objects_of("all")
        args = served(objects, tmp_path)
        assert (args.model, args.max_model_len, args.enable_prefix_caching) == ("org/model", 4096, True)
        variables = {each["name"]: each for each in container(objects)["env"]}
        assert variables["MVLLM_API_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "keys", "key": "MVLLM_API_KEY"}
        assert variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "hub"
        assert variables["OMP_NUM_THREADS"] == {"name": "OMP_NUM_THREADS", "value": "4"}

    def test_any_device_plugins_resource_can_be_given(self) -> None:
        resources = container(objects_of("all"))["resources"]
        assert resources["limits"]["example.com/accelerator"] == "2" == resources["requests"]["example.com/accelerator"]
        assert resources["limits"]["memory"] == "8Gi"
        assert "example.com/accelerator" not in str(objects_of("defaults"))

    def test_keys_and_values_have_a_volume_for_each_pod(self) -> None:
        options = yaml.safe_load(objects_of("all")["ConfigMap"]["data"]["serve.yaml"])
        mounts = {mount["name"]: mount["mountPath"] for mount in container(objects_of("all"))["volumeMounts"]}
        assert options["kv-disk-cache"] == mounts["kv"]
        [volume] = [each for each in pod(objects_of("all"))["volumes"] if each["name"] == "kv"]
        claim = volume["ephemeral"]["volumeClaimTemplate"]["spec"]
        assert claim["storageClassName"] == "fast"
        assert int(claim["resources"]["requests"]["storage"].removesuffix("Gi")) > options["kv-disk-cache-size"] == 40

    def test_a_claim_for_keys_and_values_is_for_one_server(self) -> None:
        objects = objects_of("claim")
        assert objects["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}
        with pytest.raises(helm().HelmError, match="kind to ephemeral"):
            render({"kvDiskCache": {"enabled": True, "kind": "claim"}, "replicas": 2})

    @pytest.mark.parametrize(
        "values",
        [
            {"modle": "demo"},
            {"options": {"port": 9000}},
            {"device": {"resource": "accelerator"}},
            {"autoscaling": {"targetQueueSeconds": 1}},
            {"service": {"port": 0}},
        ],
        ids=lambda values: next(iter(values)),
    )
    def test_wrong_values_are_refused(self, values: dict[str, Any]) -> None:
        with helm().Chart.load(str(CHART)) as chart, pytest.raises(helm().HelmError):
            chart.validate_schema(values)

    def test_changed_options_replace_the_pods(self) -> None:
        def checksum(values: dict[str, Any]) -> str:
            annotations = render(values)["Deployment"]["spec"]["template"]["metadata"]["annotations"]
            return str(annotations["checksum/options"])

        assert checksum({}) == checksum({"replicas": 3}) != checksum({"options": {"seed": 1}})

    def test_two_releases_have_different_names(self) -> None:
        first, second = render({}, "one"), render({}, "two")
        for kind, each in first.items():
            assert each["metadata"]["name"] != second[kind]["metadata"]["name"]
        assert render({}, "mvllm")["Service"]["metadata"]["name"] == "mvllm"


def read_settings(args: dict[str, Any]) -> Any:
    """Of mvllm-ray, which is imported here: a test that imports Ray is not one of core."""
    why = "mvllm-ray is not installed"
    return pytest.importorskip("mvllm_ray.serve.settings", reason=why, exc_type=ImportError).read_settings(args)


class TestRayService:
    service = yaml.safe_load((KUBERNETES / "rayservice.yaml").read_text())
    cluster = service["spec"]["rayClusterConfig"]

    @property
    def pods(self) -> list[dict[str, Any]]:
        groups = [self.cluster["headGroupSpec"], *self.cluster["workerGroupSpecs"]]
        return [group["template"]["spec"] for group in groups]

    def test_its_pods_are_valid(self) -> None:
        assert (self.service["apiVersion"], self.service["kind"]) == ("ray.io/v1", "RayService")
        for spec in self.pods:
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": spec}
            for version in (OLDEST, NEWEST):
                kubernetes_validate.validate(pod, version, strict=True)

    def test_serve_accepts_its_configuration(self) -> None:
        content = yaml.safe_load(self.service["spec"]["serveConfigV2"])
        schemas = pytest.importorskip("ray.serve.schema", reason="Ray is not installed", exc_type=ImportError)
        config = schemas.ServeDeploySchema(**content)
        [app] = config.applications
        assert app.import_path == "mvllm_ray.serve:build_app"
        [model] = read_settings(app.args).models
        assert model.autoscaling is not None
        [head] = [spec["containers"][0] for spec in self.pods[:1]]
        assert content["http_options"]["port"] in {port["containerPort"] for port in head["ports"]}
        [group] = self.cluster["workerGroupSpecs"]
        assert group["maxReplicas"] >= model.autoscaling.max_replicas * model.resources.num_cpus / 2
        assert float(self.pods[1]["containers"][0]["resources"]["limits"]["cpu"]) >= model.resources.num_cpus

    def test_replicas_finish_their_requests_before_a_pod_is_killed(self) -> None:
        [app] = yaml.safe_load(self.service["spec"]["serveConfigV2"])["applications"]
        [model] = read_settings(app["args"]).models
        [container] = self.pods[1]["containers"]
        command = container["lifecycle"]["preStop"]["exec"]["command"]
        assert command[:3] == ["mvllm-ray", "drain", "--timeout"]
        assert model.drain_timeout < float(command[3]) < self.pods[1]["terminationGracePeriodSeconds"]

    def test_the_version_of_ray_is_the_tested_one(self) -> None:
        pins = (KUBERNETES.parents[2] / "ci/constraints/cpu.txt").read_text()
        assert f"ray=={self.cluster['rayVersion']}\n" in pins


def test_no_manifest_names_a_maker_of_devices() -> None:
    for path in KUBERNETES.rglob("*"):
        if path.is_file():
            assert not re.search(r"nvidia|amd\.com|intel|habana", path.read_text(), re.IGNORECASE), path
