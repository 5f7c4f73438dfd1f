"""Plugin groups: found by metadata, allowed by name, imported on request, named in errors."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from mvllm import extension_api, plugin_groups
from mvllm.config.engine_args import EngineArgs
from mvllm.engine.metrics.stat_loggers import StatLoggerManager
from mvllm.entrypoints.cli.completion import complete_parser
from mvllm.entrypoints.cli.help import subcommands
from mvllm.entrypoints.cli.main import COMMANDS, installed_commands, main
from mvllm.errors import ConfigError, ModelError
from mvllm.messages.requests import SchedulerStats
from mvllm.models.registry import resolve_model_class, supported_architectures
from mvllm.ops.provider_plugins import check_providers, installed_providers
from tests.helpers.plugins import prepend, write_metadata
from tests.unit.engine.builders import make_config

GROUPS = {
    "mvllm.checkpoint_formats": "acme",
    "mvllm.models": "AcmeForCausalLM",
    "mvllm.model_types": "acme",
    "mvllm.model_impls": "acme",
    "mvllm.quantization": "acme",
    "mvllm.executors": "acme",
    "mvllm.op_providers": "acme",
    "mvllm.stat_loggers": "acme",
    "mvllm.cli": "acme",
    "mvllm.tool_parsers": "acme",
    "mvllm.reasoning_parsers": "acme",
    "mvllm.parser_rules": "acme",
    "mvllm.foreign_keywords": "acme",
    "mvllm.http": "acme",
    "mvllm.logits_processors": "acme",
    "mvllm.request_pairs": "acme",
    "mvllm.logits_combiners": "acme",
    "mvllm.kv_connectors": "acme",
    "mvllm.proposers": "acme",
    "mvllm.aliases": "acme",
    "mvllm.engine_methods": "acme",
    "mvllm.serve": "acme",
    "mvllm.workers": "acme_capability",
}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Installs a distribution acme-extras whose module `acme_extras` has the given source text."""

    def install(text, *, groups=GROUPS, distribution="acme-extras", module="acme_extras") -> Path:
        points = "".join(f"[{group}]\n{name} = {module}\n" for group, name in groups.items())
        folder = write_metadata(tmp_path / distribution, distribution, points)
        (folder / f"{module}.py").write_text(text)
        prepend(monkeypatch, [str(folder)])
        monkeypatch.delitem(sys.modules, module, raising=False)
        return folder

    yield install
    for name in [name for name in sys.modules if name.startswith("acme_extras")]:
        del sys.modules[name]


def point_at(site, group, value, text):
    """One entry point `acme` of `group` that refers to `value` of a module."""
    folder = site(text, groups={group: "acme"})
    info = folder / "acme_extras-0.1.0.dist-info" / "entry_points.txt"
    info.write_text(f"[{group}]\nacme = acme_extras:{value}\n")


@pytest.mark.parametrize("group", plugin_groups.ALL, ids=lambda group: group.group)
class TestEveryGroup:
    def test_listing_plugins_imports_nothing(self, group, site):
        site("raise AssertionError('imported')")
        name = GROUPS[group.group]
        assert name in plugin_groups.allowed_names(group)
        assert plugin_groups.find(group, name).distribution == "acme-extras"
        assert "acme_extras" not in sys.modules

    def test_a_broken_plugin_is_named_with_distribution_version_and_error(self, group, site):
        site("import there_is_no_such_driver")
        with pytest.raises(ConfigError, match=r"acme-extras 0\.1\.0.*there_is_no_such_driver.*pip install") as caught:
            plugin_groups.load_plugin_by_name(group, GROUPS[group.group])
        assert isinstance(caught.value.__cause__, ImportError)

    def test_a_plugin_that_exits_the_process_is_named(self, group, site):
        site("raise SystemExit('no licence')")
        with pytest.raises(ConfigError, match=r"acme-extras 0\.1\.0.*no licence"):
            plugin_groups.load_plugin_by_name(group, GROUPS[group.group])

    def test_parts_of_mvllm_need_no_place_in_the_allow_list(self, group, site, monkeypatch):
        site("", distribution="mvllm-bench")
        monkeypatch.setenv("MVLLM_PLUGINS", "somebody-else")
        assert plugin_groups.find(group, GROUPS[group.group]).distribution == "mvllm-bench"

    @pytest.mark.parametrize("listed", ["", "somebody-else", "somebody-else, other"])
    def test_a_plugin_outside_the_allow_list_is_refused_without_import(self, group, site, monkeypatch, listed):
        site("raise AssertionError('imported')")
        monkeypatch.setenv("MVLLM_PLUGINS", listed)
        name = GROUPS[group.group]
        assert name not in plugin_groups.allowed_names(group)
        with pytest.raises(ConfigError, match=r"acme-extras 0\.1\.0.*MVLLM_PLUGINS.*Add acme-extras"):
            plugin_groups.load_plugin_by_name(group, name)
        assert "acme_extras" not in sys.modules

    @pytest.mark.parametrize("listed", ["acme-extras", "x, ACME-Extras", "own name"])
    def test_a_plugin_is_allowed_by_its_package_or_its_name(self, group, site, monkeypatch, listed):
        site("")
        name = GROUPS[group.group]
        monkeypatch.setenv("MVLLM_PLUGINS", listed.replace("own name", name))
        assert plugin_groups.load_plugin_by_name(group, name)[1].__name__ == "acme_extras"

    def test_two_packages_with_one_name_are_both_named_and_the_allow_list_selects_one(self, group, site, monkeypatch):
        site("")
        site("", distribution="acme-fork", module="acme_extras_fork")
        name = GROUPS[group.group]
        with pytest.raises(ConfigError, match=r"acme-extras 0\.1\.0.*acme-fork 0\.1\.0.*MVLLM_PLUGINS"):
            plugin_groups.find(group, name)
        monkeypatch.setenv("MVLLM_PLUGINS", "acme-fork")
        assert plugin_groups.load_plugin_by_name(group, name)[1].__name__ == "acme_extras_fork"

    def test_a_part_of_mvllm_keeps_its_names_unless_the_allow_list_has_the_other(self, group, site, monkeypatch):
        site("", distribution="mvllm-bench")
        site("", distribution="acme-fork", module="acme_extras_fork")
        name = GROUPS[group.group]
        for listed in (None, name, "somebody-else", "mvllm-bench", "acme-fork, mvllm-bench"):
            if listed is not None:
                monkeypatch.setenv("MVLLM_PLUGINS", listed)
            assert plugin_groups.find(group, name).distribution == "mvllm-bench"
        monkeypatch.setenv("MVLLM_PLUGINS", "acme-fork")
        assert plugin_groups.find(group, name).distribution == "acme-fork"

    def test_an_unknown_name_is_refused_with_the_installed_ones(self, group, site):
        site("")
        with pytest.raises(ConfigError, match=f"'nobody'.*{group.group}.*{GROUPS[group.group]}"):
            plugin_groups.load_plugin_by_name(group, "nobody")


@pytest.mark.parametrize("listed", ["", "somebody-else"])
def test_parts_of_mvllm_are_always_allowed(listed, site, monkeypatch):
    site("", groups={"mvllm.checkpoint_formats": "acme"}, distribution="mvllm-acme")
    monkeypatch.setenv("MVLLM_PLUGINS", listed)
    assert "acme" not in plugin_groups.allowed_names(plugin_groups.CHECKPOINT_FORMATS)
    requirement = "mvllm-acme<0.2,>=0.1; extra == 'parts'"
    monkeypatch.setattr("importlib.metadata.requires", lambda name: [requirement])
    assert "acme" in plugin_groups.allowed_names(plugin_groups.CHECKPOINT_FORMATS)


def test_a_command_is_listed_as_that_of_the_package_that_runs_it(site):
    site("", groups={"mvllm.cli": "acme"}, distribution="mvllm-bench")
    site("", groups={"mvllm.cli": "acme"}, distribution="zzz-fork", module="acme_extras_fork")
    assert installed_commands()["acme"].distribution == "mvllm-bench"


class TestModels:
    def test_an_installed_architecture_is_listed_as_supported(self, site):
        site("")
        assert "AcmeForCausalLM" in supported_architectures()

    def test_an_object_that_is_no_model_class_is_refused_by_name(self, site):
        site("")
        with pytest.raises(ModelError, match=r"acme-extras 0\.1\.0.*CausalLM"):
            resolve_model_class("AcmeForCausalLM")

    def test_cores_model_class_takes_precedence_with_a_warning(self, site, caplog):
        site("raise AssertionError('imported')", groups={"mvllm.models": "OPTForCausalLM"})
        with caplog.at_level("WARNING", logger="mvllm"):
            assert resolve_model_class("OPTForCausalLM").__module__ == "mvllm.models.opt"
        assert "acme-extras 0.1.0" in caplog.text


class TestOpProviders:
    def test_a_set_that_is_not_installed_is_refused_before_workers_start(self):
        with pytest.raises(ConfigError, match="op_providers names 'acme'"):
            check_providers(["acme"])

    @pytest.mark.parametrize("body", ["return 3", "return [3]", "raise OSError('no driver')", "raise SystemExit(1)"])
    def test_a_function_that_returns_no_providers_is_named(self, site, body):
        point_at(site, "mvllm.op_providers", "make", f"def make():\n    {body}\n")
        with pytest.raises(ConfigError, match=r"acme-extras 0\.1\.0"):
            installed_providers(["acme"])


LOGGER = """
from mvllm.extension_api import StatLogger
calls = []
class Acme(StatLogger):
    def __init__(self, config):
        {init}
    def record(self, stats, num_new_tokens):
        calls.append((stats.num_running, num_new_tokens))
        {record}
    def close(self):
        calls.append("closed")
"""


class TestStatLoggers:
    @pytest.fixture
    def config(self):
        return replace(make_config(), stat_loggers=("acme",))

    def test_a_logger_is_called_for_every_step_until_it_is_closed_once(self, site, config):
        point_at(site, "mvllm.stat_loggers", "Acme", LOGGER.format(init="pass", record="pass"))
        loggers = StatLoggerManager(config)
        loggers.record(SchedulerStats(num_running=3), 2)
        loggers.close()
        loggers.close()
        assert sys.modules["acme_extras"].calls == [(3, 2), "closed"]

    def test_a_logger_that_raises_is_named_once_and_not_called_again(self, site, config, caplog):
        text = LOGGER.format(init="pass", record="raise OSError('disk full')")
        point_at(site, "mvllm.stat_loggers", "Acme", text)
        loggers = StatLoggerManager(config)
        with caplog.at_level("ERROR", logger="mvllm"):
            loggers.record(SchedulerStats(), 1)
            loggers.record(SchedulerStats(), 1)
        assert caplog.text.count("acme-extras 0.1.0") == 1 and "disk full" in caplog.text
        assert sys.modules["acme_extras"].calls == [(0, 1), "closed"]

    @pytest.mark.parametrize(
        ("value", "init"),
        [("Acme", "raise OSError('no such host')"), ("Acme", "raise SystemExit(2)"), ("calls.copy", "")],
    )
    def test_a_logger_that_cannot_be_created_is_named(self, site, config, value, init):
        point_at(site, "mvllm.stat_loggers", value, LOGGER.format(init=init or "pass", record="pass"))
        with pytest.raises(ConfigError, match=r"acme-extras 0\.1\.0"):
            StatLoggerManager(config)


class TestCommands:
    BROKEN: ClassVar = {"mvllm.cli": "broken"}
    TEXT = (
        "def add_arguments(parser):\n    parser.add_argument('word')\n"
        "def run(args):\n    print(args.word)\n    return 7\n"
    )

    def test_a_command_of_another_package_runs(self, site, capsys):
        site(self.TEXT)
        assert main(["acme", "hello"]) == 7
        assert capsys.readouterr().out == "hello\n"

    def test_help_lists_it_with_its_package_and_imports_nothing(self, site, capsys):
        site("raise AssertionError('imported')")
        with pytest.raises(SystemExit):
            main(["--help"])
        assert "acme-extras 0.1.0" in capsys.readouterr().out

    def test_help_describes_it_by_the_summary_of_its_package(self, site, capsys):
        folder = site(self.TEXT)
        metadata = folder / "acme_extras-0.1.0.dist-info" / "METADATA"
        metadata.write_text(metadata.read_text() + "Summary: Says a word, 100% of it.\n")
        with pytest.raises(SystemExit):
            main(["--help"])
        assert "acme says a word, 100% of it (acme-extras 0.1.0)" in " ".join(capsys.readouterr().out.split())
        with pytest.raises(SystemExit):
            main(["acme", "--help"])
        assert "Says a word, 100% of it." in capsys.readouterr().out

    def test_the_shell_completes_it_and_passes_a_broken_one_over(self, site, caplog):
        site(self.TEXT.replace("'word'", "'--word'"))
        assert "--word" in subcommands(complete_parser())["acme"]._option_string_actions
        site(
            "import there_is_no_such_driver",
            distribution="acme-broken",
            module="acme_extras_broken",
            groups=self.BROKEN,
        )
        with caplog.at_level("WARNING", logger="mvllm"):
            assert "broken" in subcommands(complete_parser())
        assert "acme-broken 0.1.0" in caplog.text and "there_is_no_such_driver" in caplog.text

    def test_plugins_cannot_replace_cores_commands(self, site, capsys):
        site("raise AssertionError('imported')", groups={"mvllm.cli": "platforms"})
        assert "platforms" in COMMANDS
        assert main(["platforms"]) == 0

    def test_a_module_that_is_no_command_is_named(self, site, capsys):
        site("")
        assert main(["acme"]) == 1
        assert "acme-extras 0.1.0" in capsys.readouterr().err


def test_names_in_a_setting_are_separated_by_commas():
    config = EngineArgs("demo", stat_loggers="a, b,a,", op_providers="c").create_engine_config()
    assert (config.stat_loggers, config.op_providers) == (("a", "b"), ("c",))


def test_every_name_of_the_extension_api_exists_and_no_others_are_exported():
    for name in extension_api.__all__:
        assert getattr(extension_api, name).__name__ == name
    assert set(extension_api.__all__) == set(extension_api._MODULES)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = extension_api.no_such_name


@pytest.mark.parametrize("name", [each.name for each in pkgutil.iter_modules(extension_api.__path__)])
def test_a_submodule_of_the_extension_api_exports_what_it_lists(name):
    module = importlib.import_module(f"mvllm.extension_api.{name}")
    names = getattr(module, "_MODULES", vars(module))  # the former of modules whose names are resolved on first use
    public = {each for each in names if not each.startswith("_") and each != "annotations"}
    assert public == {each for each in module.__all__ if not each.startswith("_")}
    assert all(hasattr(module, each) for each in module.__all__)
