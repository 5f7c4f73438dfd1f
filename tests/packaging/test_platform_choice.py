"""Platform selection, and the errors when no platform, several, or a broken one is installed.

Every test starts a new interpreter in an environment without torch and without a platform, with temporary plugin
distributions. So each test also shows that platform selection needs no torch.
"""

from __future__ import annotations

import json
import textwrap

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from mvllm.plugin_api import CONTRACT

MAJOR, MINOR = CONTRACT

PLUGIN = """
from mvllm.plugin_api import PlatformSpec, hookimpl
{trace}
{first_line}

@hookimpl
def mvllm_platform():
    return PlatformSpec(
        name={name!r},
        vendor="Acme",
        contract={contract!r},
        probe="mvllm_{name}.probe:probe",
        factory="mvllm_{name}.device:make_platform",
        {spec}
    )
"""

PROBE = """
from mvllm.plugin_api import ProbeResult
{trace}

def probe():
    {probe_body}
    return ProbeResult(available={available!r}, reason={reason!r}, remedy={remedy!r})
"""

DEVICE = """
from mvllm.plugin_api import Capabilities, Platform
{trace}

class ThrowawayPlatform(Platform):
    spec = capabilities = None
    plan = topology = init_device = communicator = attention_backend = None

def make_platform():
    {factory_body}
    return ThrowawayPlatform()
"""

TRACE = "import os; open(os.environ['TRACE'], 'a').write(__name__ + chr(10))"


class Plugins:
    """A folder of temporary plugin distributions."""

    def __init__(self, folder, environment):
        self.folder = folder
        self.environment = environment
        self.trace = folder / "trace.txt"
        self.trace.touch()

    def add(
        self,
        name,
        *,
        distribution=None,
        version="1.2.3",
        contract=CONTRACT,
        available=True,
        reason="one device",
        remedy=None,
        first_line="",
        probe_body="pass",
        factory_body="pass",
        entry_point=None,
        spec="",
    ):
        package = self.folder / f"mvllm_{name}"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
        values = {key: value for key, value in locals().items() if key not in ("self", "package")}
        values["trace"] = TRACE
        for module, template in {"plugin": PLUGIN, "probe": PROBE, "device": DEVICE}.items():
            (package / f"{module}.py").write_text(template.format(**values))
        distribution = distribution or f"mvllm-{name}"
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        value = entry_point or f"mvllm_{name}.plugin"
        (info / "entry_points.txt").write_text(f"[mvllm.platforms]\n{name} = {value}\n")
        return self

    def imported(self):
        return set(self.trace.read_text().split())

    def outcome(self, program, **variables):
        """Runs a program; returns its output, or the type and message of the error that ended it."""
        wrapped = (
            "import json\ntry:\n"
            + textwrap.indent(textwrap.dedent(program), "    ")
            + textwrap.dedent("""
            except Exception as error:
                names = [kind.__name__ for kind in type(error).__mro__]
                print(json.dumps({"error": names, "text": str(error)}))
        """)
        )
        printed = self.environment.evaluate(wrapped, path=[self.folder], TRACE=str(self.trace), **variables)
        return json.loads(printed.splitlines()[-1])

    def choose(self, name=None, **variables):
        return self.outcome(
            f"""
            from mvllm.platform.choose import choose_platform
            chosen = choose_platform({name!r})
            print(json.dumps({{"name": chosen.source.name, "kind": type(chosen.platform).__name__}}))
            """,
            **variables,
        )

    def choose_each(self, *names):
        """The outcomes of `choose` for several names in one interpreter."""
        return self.outcome(f"""
            from mvllm.platform.choose import choose_platform
            outcomes = []
            for name in {names!r}:
                try:
                    outcomes.append({{"name": choose_platform(name).source.name}})
                except Exception as error:
                    kinds = [kind.__name__ for kind in type(error).__mro__]
                    outcomes.append({{"error": kinds, "text": str(error)}})
            print(json.dumps(outcomes))
            """)

    def start_llm(self, model, **variables):
        return self.outcome(f"from mvllm import LLM\nLLM(model={str(model)!r})", **variables)


@pytest.fixture
def plugins(tmp_path, core_only):
    folder = tmp_path / "plugins"
    folder.mkdir()
    return Plugins(folder, core_only)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model folder with a valid config; no test here loads its weights."""
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"<{number}>": number for number in range(config["vocab_size"])}
    Tokenizer(WordLevel(words, unk_token="<0>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


# ------------------------------------------------------------------------------------------------------ through LLM


def test_with_no_platform_llm_says_which_package_to_install(plugins, model):
    outcome = plugins.start_llm(model)
    assert "PlatformError" in outcome["error"]
    assert "No platform" in outcome["text"]
    assert (
        "mvllm-cpu" in outcome["text"]
        and "pip install --require-hashes --no-deps -r WHEELHOUSE/cpu.txt" in outcome["text"]
    )


def test_with_two_available_llm_says_which_flag_chooses(plugins, model):
    plugins.add("acme").add("zeta")
    outcome = plugins.start_llm(model)
    assert "PlatformError" in outcome["error"]
    for word in ("--platform acme", "--platform zeta", "MVLLM_PLATFORM", "mvllm-acme 1.2.3", "mvllm-zeta 1.2.3"):
        assert word in outcome["text"]


def test_with_a_broken_one_llm_says_what_broke(plugins, model):
    plugins.add("acme", first_line="import acme_driver_bindings")
    outcome = plugins.start_llm(model)
    assert "PlatformError" in outcome["error"]
    for word in ("mvllm-acme 1.2.3", "broken", "No module named 'acme_driver_bindings'", "remedy"):
        assert word in outcome["text"]


def test_the_command_line_says_the_same_without_a_traceback(plugins, model):
    arguments = ["generate", "--model", model, "--prompt", "Hello"]
    main = "import sys; from mvllm.entrypoints.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = plugins.environment.run("-c", main, *arguments, path=[plugins.folder])
    assert done.returncode == 1
    assert "pip install --require-hashes --no-deps -r WHEELHOUSE/cpu.txt" in done.stderr
    assert "Traceback" not in done.stderr


# --------------------------------------------------------------------------------------------------------- choosing


def test_the_single_available_platform_is_taken(plugins):
    plugins.add("acme").add("zeta", available=False, reason="no such device")
    assert plugins.choose() == {"name": "acme", "kind": "ThrowawayPlatform"}


def test_one_device_is_taken_before_the_host_and_a_plugin_that_says_nothing_has_one(plugins):
    plugins.add("acme", contract=(1, 0)).add("cpu", spec="is_host=True,")
    assert plugins.choose()["name"] == "acme"
    plugins.add("zeta")
    text = plugins.choose()["text"]
    assert text.startswith("Several platforms are available; choose one with --platform acme or --platform cpu or")


def test_the_variable_chooses_and_only_that_plugin_is_imported(plugins):
    plugins.add("acme").add("zeta")
    assert plugins.choose(MVLLM_PLATFORM="zeta")["name"] == "zeta"
    assert plugins.imported() == {"mvllm_zeta.plugin", "mvllm_zeta.probe", "mvllm_zeta.device"}


def test_an_argument_outranks_the_variable(plugins):
    plugins.add("acme").add("zeta")
    assert plugins.choose("acme", MVLLM_PLATFORM="zeta")["name"] == "acme"


def test_requesting_a_platform_that_is_not_installed_lists_the_installed_ones(plugins):
    plugins.add("acme")
    assert plugins.choose("zeta")["text"].startswith(
        "No platform is called 'zeta'; installed: acme. mvllm has packages"
    )
    text = plugins.choose("cdua")["text"]
    assert text.startswith("No platform is called 'cdua'; installed: acme. Did you mean 'cuda'? Run: ")
    assert "Did you mean" not in plugins.choose("gpu")["text"], "any of several"
    assert "-r WHEELHOUSE/cuda.txt" in text and "mvllm-cdua" not in text
    text = plugins.choose("cuda")["text"]
    assert "The platform 'cuda' is not installed (installed: acme). Its package is mvllm-cuda. Run: " in text


def test_none_available_gives_every_reason_and_remedy(plugins):
    plugins.add("acme", available=False, reason="no device file", remedy="load the driver")
    plugins.add("zeta", available=False, reason="permission denied", remedy="join the group")
    text = plugins.choose()["text"]
    for word in ("no device file", "load the driver", "permission denied", "join the group"):
        assert word in text


def test_requesting_an_unavailable_platform_says_why_and_what_to_do(plugins):
    plugins.add("acme", available=False, reason="no device file", remedy="load the driver").add("zeta")
    text = plugins.choose("acme")["text"]
    assert "no device file" in text and "load the driver" in text


# ------------------------------------------------------------------------------------------------------- what breaks


def test_a_broken_plugin_is_not_skipped_silently(plugins):
    plugins.add("acme").add("zeta", first_line="raise ImportError('libzeta.so: cannot open')")
    text = plugins.choose()["text"]
    assert "libzeta.so: cannot open" in text and "mvllm-zeta 1.2.3" in text
    assert "--platform acme" in text, "the way to go on without it"


def test_choosing_another_platform_avoids_the_broken_plugin(plugins):
    plugins.add("acme").add("zeta", first_line="raise ImportError('libzeta.so: cannot open')")
    assert plugins.choose("acme")["name"] == "acme"


@pytest.mark.parametrize(
    ("flaw", "sign"),
    [
        pytest.param({"first_line": "raise SystemExit('gone')"}, "gone", marks=pytest.mark.exhaustive),
        ({"probe_body": "raise OSError('the driver is not loaded')"}, "the driver is not loaded"),
        ({"probe_body": "return True"}, "must return a ProbeResult"),
        ({"factory_body": "raise RuntimeError('firmware too old')"}, "firmware too old"),
        pytest.param(
            {"factory_body": "raise SystemExit('not licensed')"}, "not licensed", marks=pytest.mark.exhaustive
        ),
        ({"factory_body": "return object()"}, "must return a mvllm.plugin_api.Platform"),
        ({"entry_point": "mvllm_acme.absent"}, "mvllm_acme.absent"),
        ({"entry_point": "mvllm_acme.probe"}, "mvllm_platform()"),
    ],
)
def test_each_plugin_failure_is_reported_with_the_plugins_name(plugins, flaw, sign):
    plugins.add("acme", **flaw)
    for outcome in plugins.choose_each(None, "acme"):
        assert "PlatformError" in outcome["error"]
        assert sign in outcome["text"]
        assert "mvllm-acme 1.2.3" in outcome["text"]


def test_two_distributions_with_one_name_are_both_named(plugins):
    plugins.add("acme").add("acme", distribution="acme-fork", version="9.0")
    text = plugins.choose("acme")["text"]
    assert "mvllm-acme 1.2.3" in text and "acme-fork 9.0" in text


# --------------------------------------------------------------------------------------------------------- contract


@pytest.mark.parametrize(
    ("contract", "command"),
    [
        ((MAJOR, MINOR + 1), "of a newer release)"),
        pytest.param((MAJOR + 1, 0), "of a newer release)", marks=pytest.mark.exhaustive),
        pytest.param((MAJOR - 1, 9), "pip install -U mvllm-acme", marks=pytest.mark.exhaustive),
    ],
)
def test_another_contract_is_an_error_with_both_versions_and_the_command(plugins, contract, command):
    plugins.add("acme", contract=contract)
    outcome = plugins.choose("acme")
    assert outcome["error"][0] == "ContractError"
    for word in ("mvllm-acme 1.2.3", "mvllm 0.9.0", f"{contract[0]}.{contract[1]}", f"{MAJOR}.{MINOR}"):
        assert word in outcome["text"]
    assert any(line.endswith(command) for line in outcome["text"].splitlines()), outcome["text"]


def test_the_contract_is_checked_before_device_code_is_imported(plugins):
    plugins.add("acme", contract=(MAJOR + 1, 0))
    plugins.choose("acme")
    assert plugins.imported() == {"mvllm_acme.plugin"}
