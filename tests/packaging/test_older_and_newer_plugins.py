"""A plugin works with every later minor version of the contract; any other version is rejected with an error that names
it.

`frozen_plugin_1_0` was written against contract 1.0, `frozen_plugin_1_1` against 1.1. Their wheels are installed next
to the wheel of the current core, and the core is patched to report other contract versions, as a future release will.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from mvllm.plugin_api import CONTRACT
from tests.e2e.demo_model_expectations import COMPLETIONS, says
from tests.packaging import wheels
from tests.packaging.conftest import REPOSITORY

FROZEN, FROST = (Path(__file__).parent / f"frozen_plugin_1_{minor}" for minor in (0, 1))
SHA256 = {
    FROZEN: "ff4cd1affb17eda81f5d7c5bb60e8ea6c53ea98c378964e2b41c07c2b3667268",
    FROST: "1636a381cd1044a7c4d55ce065997c5e0e7b36c8bf434b94bc1c7475335ce437",
}

GENERATE = """
import json
from mvllm import LLM, SamplingParams
prompts = {prompts!r}
with LLM("demo", platform={platform!r}, max_model_len=512, kv_cache_memory_bytes=32 * 2**20, **{settings!r}) as llm:
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=48), use_tqdm=False)
    print(json.dumps([output.outputs[0].text for output in outputs]))
"""

CHOOSE = """
import json
from mvllm import PlatformError
from mvllm.platform.choose import choose_platform
try:
    print(json.dumps(["chosen", str(choose_platform("frozen"))]))
except PlatformError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


@pytest.fixture(scope="module")
def beside_torch(tmp_path_factory):
    return wheels.link_torch(tmp_path_factory.mktemp("with_torch") / "site")


@pytest.fixture(scope="module")
def install_frozen(tmp_path_factory, core_only):
    """Installs the wheel of a copy of the frozen plugin in which one text was replaced."""

    def install(*replacements):
        folder = tmp_path_factory.mktemp("frozen")
        project = shutil.copytree(FROZEN, folder / "project")
        plugin = project / "src" / "mvllm_frozen" / "plugin.py"
        for old, new in replacements:
            assert old in plugin.read_text()
            plugin.write_text(plugin.read_text().replace(old, new))
        return wheels.install(folder / "site", wheels.build(project))

    return install


@pytest.fixture(scope="module")
def frozen(install_frozen):
    return install_frozen()


@pytest.fixture
def core_of(tmp_path):
    """A folder that, on the search path, makes the core report this contract version."""

    def make(major, minor):
        folder = tmp_path / f"core_{major}_{minor}"
        wheels.write(
            folder, "sitecustomize.py", f"from mvllm.platform import spec\nspec.CONTRACT = ({major}, {minor})\n"
        )
        return folder

    return make


@pytest.mark.parametrize("folder", SHA256, ids=lambda folder: folder.name)
def test_a_frozen_plugin_is_unchanged(folder):
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.suffix in (".py", ".toml"):
            digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    assert digest.hexdigest() == SHA256[folder], "a frozen plugin is not changed to follow the core: see its README.md"


@pytest.mark.parametrize(
    "contract",
    [pytest.param(CONTRACT, marks=pytest.mark.exhaustive), (CONTRACT[0], CONTRACT[1] + 1)],
    ids=["this_core", "the_next_minor"],
)
def test_a_plugin_of_an_older_minor_generates_the_expected_text(core_only, beside_torch, frozen, core_of, contract):
    folders = [] if contract == CONTRACT else [core_of(*contract)]
    path = [*folders, frozen, beside_torch]
    reported = core_only.evaluate("from mvllm.plugin_api import CONTRACT; print(*CONTRACT)", path=path)
    assert reported == f"{contract[0]} {contract[1]}"
    prompts = list(COMPLETIONS)[:6]
    assert not wrong_texts(core_only, path, prompts, "frozen")


def wrong_texts(core_only, path, prompts, platform, **settings):
    """The texts of an engine that are not those of the demo model, by prompt."""
    program = GENERATE.format(prompts=prompts, platform=platform, settings=settings)
    texts = json.loads(core_only.evaluate(program, path=path, timeout=300).splitlines()[-1])
    return {prompt: text for prompt, text in zip(prompts, texts, strict=True) if not says(text, COMPLETIONS[prompt])}


@pytest.fixture(scope="module")
def frost(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frost")
    return wheels.install(folder / "site", wheels.build(shutil.copytree(FROST, folder / "project")))


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """A folder with the package mvllm-graph."""
    folder = tmp_path_factory.mktemp("graphs")
    return wheels.install(folder / "site", wheels.build_part(REPOSITORY / "plugins" / "graph", folder))


def test_a_plugin_of_contract_1_1_generates_the_expected_text(core_only, beside_torch, frost):
    """Also with what is deprecated: refusals of dtypes in its plan, Platform.graphs, LaunchTopology.ray_resource."""
    prompts = list(COMPLETIONS)[:2]
    assert not wrong_texts(core_only, [frost, beside_torch], prompts, "frost", kv_offloading_size=0.01)


def test_its_models_run_as_graphs_with_the_package_for_them(core_only, beside_torch, frost, graphs):
    prompts = list(COMPLETIONS)[:2]
    assert not wrong_texts(core_only, [frost, graphs, beside_torch], prompts, "frost-graphs")


def test_without_the_package_for_graphs_an_error_names_it(core_only, beside_torch, frost):
    refused = core_only.run(
        *["-m", "mvllm", "generate", "--model", "demo", "--prompt", "x", "--platform", "frost-graphs"],
        path=[frost, beside_torch],
    )
    assert refused.returncode == 1 and "Traceback" not in refused.stderr
    [line] = [line for line in refused.stderr.splitlines() if "mvllm-graph" in line]
    assert "needs the package mvllm-graph, which is not installed. Run: " in line and "-r WHEELHOUSE/" in line


def test_its_plan_its_operations_and_its_checks_are_used(core_only, beside_torch, frozen):
    path = [frozen, beside_torch]
    printed = core_only.evaluate(
        """
        import contextlib, io, json
        from mvllm.entrypoints.cli.doctor_checks import run_checks
        from mvllm.entrypoints.cli.main import main
        from mvllm.ops.registry import OpTable
        from mvllm.platform.choose import choose_platform
        platform = choose_platform("frozen").platform
        [norm] = [row for row in OpTable.resolve(platform.ops()).describe() if row.op == "rms_norm"]
        command = "generate --model demo --prompt x --platform frozen --tensor-parallel-size 2"
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            status = main([*command.split(), "--pipeline-parallel-size", "2"])
        print(json.dumps({
            "refused": [status, errors.getvalue()],
            "norm": norm.candidates,
            "checks": {check.id: check.status.value for check in run_checks(platform="frozen")},
        }))
        """,
        path=path,
    )
    seen = json.loads(printed.splitlines()[-1])
    assert seen["norm"][0] == "ice-rms-norm"
    assert seen["checks"]["platform.frozen.temperature"] == "ok"
    assert "broken" not in {status for name, status in seen["checks"].items() if name.startswith("platform.")}
    status, errors = seen["refused"]
    assert status == 1
    assert "There are two devices, not 4." in errors and "Ask for at most 2." in errors


def test_a_core_of_the_next_major_refuses_it_with_both_versions_and_the_command(core_only, frozen, core_of):
    kind, text = json.loads(core_only.evaluate(CHOOSE, path=[core_of(2, 0), frozen]))
    assert kind == "ContractError"
    assert "mvllm-frozen 1.0.3 was built for platform contract 1.0" in text
    assert "mvllm 0.9.0 speaks 2.0. Run: " in text and text.endswith("pip install -U mvllm-frozen")


@pytest.mark.parametrize("plugin", ["frozen", "frost"], ids=["contract_1_0", "contract_1_1"])
def test_it_is_chosen_before_the_host(core_only, beside_torch, request, tmp_path, plugin):
    host = wheels.install(tmp_path / "host", wheels.plugin_wheel(tmp_path, "cpu", spec="is_host=True,"))
    path = [request.getfixturevalue(plugin), host, beside_torch]
    kind, text = json.loads(core_only.evaluate(CHOOSE.replace('"frozen"', ""), path=path))
    assert (kind, text.split(",")[0]) == ("chosen", plugin), text


@pytest.mark.parametrize("contract", [f"({CONTRACT[0]}, {CONTRACT[1] + 1})", f"({CONTRACT[0] + 1}, 0)"])
def test_a_plugin_of_a_later_contract_is_refused_by_this_core(core_only, install_frozen, contract):
    newer = install_frozen(("contract=(1, 0)", f"contract={contract}"))
    kind, text = json.loads(core_only.evaluate(CHOOSE, path=[newer]))
    assert kind == "ContractError"
    dotted = contract.strip("()").replace(", ", ".")
    assert f"mvllm-frozen 1.0.3 was built for platform contract {dotted}" in text
    assert f"mvllm 0.9.0 speaks {CONTRACT[0]}.{CONTRACT[1]}. Run: " in text and "of a newer release)" in text


def test_a_platform_whose_torch_backend_name_is_taken_names_the_owner(
    core_only, beside_torch, install_frozen, tmp_path
):
    owner = install_frozen(("torch_floor=", 'torch_backend="ice", torch_floor='))
    code = "def start():\n    import torch\n    torch.utils.rename_privateuse1_backend('lava')\n"
    wheel = wheels.library_wheel(tmp_path, "torch-lava", "7.0", code, autoload=True)
    rival = wheels.install(tmp_path / "rival", wheel)
    program = GENERATE.format(prompts=["The capital of France is"], platform="frozen", settings={})
    path = [owner, rival, beside_torch]
    refused = core_only.run("-c", program, path=path, timeout=300)
    assert refused.returncode == 1
    for words in (
        "'frozen' registers itself with torch as 'ice'",
        "is registered as 'lava' already",
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0",
    ):
        assert words in refused.stderr
    printed = core_only.evaluate(program, path=path, timeout=300, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "Paris" in printed
