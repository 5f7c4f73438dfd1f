"""The `mvllm` command, run in this process with a scripted engine core."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys

import pytest

from mvllm import SamplingParams, installable, plugin_groups
from mvllm.config.engine_args import EngineArgs
from mvllm.config.human_readable_int import human_readable_int
from mvllm.entrypoints.cli import arguments
from mvllm.entrypoints.cli.main import COMMANDS, PART_COMMANDS, _make_parser, installed_commands, load_command, main
from mvllm.installation import install_command
from tests.unit.entrypoints.builders import ANSWER_TEXT, echo, save_model_folder, use_fake_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def clients(monkeypatch):
    return use_fake_engine(monkeypatch)


def type_in(monkeypatch, text):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def usage_error(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    return capsys.readouterr().err


def check_engine_options(command, capsys):
    """The help of a command has all settings of the engine and of sampling."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    for setting in EngineArgs.options():
        if setting.name != "skip_tokenizer_init":
            assert f"--{setting.name.replace('_', '-')}" in text
    for title in ("model:", "KV cache:", "scheduler:", "sampling:"):
        assert title in text


def check_positional_model(command):
    """A command takes the model as its first argument, or by name."""
    parser = _make_parser(command[0], load_command(command[0]), installed_commands())
    for named in (["m"], ["--model", "m"], ["m", "--model", "m"], ["--model", "other", "--model", "m"]):
        assert parser.parse_args([*command, *named]).model == "m"
    assert not hasattr(parser.parse_args(command), "model")
    with pytest.raises(SystemExit):
        parser.parse_args([command[0], "--help"])


def check_light_help(*commands):
    """Help imports no torch."""
    code = (
        "import sys\nfrom mvllm.entrypoints.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    for argv in commands:
        ran = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, (argv, ran.stderr)


class TestHelp:
    def test_help_imports_no_torch(self):
        check_light_help(["--help"], ["--version"], *([command, "--help"] for command in COMMANDS))

    def test_every_setting_of_the_engine_is_an_option(self, capsys):
        check_engine_options("generate", capsys)

    def test_help_with_a_word_shows_matching_options(self, capsys):
        with pytest.raises(SystemExit) as caught:
            main(["generate", "--help=prefix"])
        text = capsys.readouterr().out
        assert caught.value.code == 0
        assert "--enable-prefix-caching" in text
        assert "--temperature" not in text

    def test_help_names_the_groups_of_options_and_the_defaults_of_switches(self, capsys):
        with pytest.raises(SystemExit):
            main(["serve", "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert "Groups of options: server, access, limits, chat," in text
        assert "`mvllm serve --help=server` prints one group" in text
        assert "Reuse the KV of equal prompt prefixes. Default: on." in text

    def test_each_sampling_parameter_has_a_help_text(self):
        texts = arguments.attribute_help(SamplingParams)
        assert set(texts) == set(SamplingParams.__struct_fields__)
        assert all(texts.values())


class TestGenerate:
    def test_it_prints_the_prompt_with_its_continuation_and_the_speed(self, folder, clients, capsys):
        assert main(["generate", "--model", folder, "--prompt", "Hello "]) == 0
        captured = capsys.readouterr()
        assert captured.out == f"Hello {ANSWER_TEXT}\n"
        last_line = captured.err.rstrip().splitlines()[-1]
        assert "output tokens/s" in last_line
        assert last_line.endswith("platform fake, from nowhere")

    def test_several_prompts_come_in_order(self, folder, monkeypatch, capsys):
        use_fake_engine(monkeypatch, echo)
        assert main(["generate", "--model", folder, "--prompt", "The cat sat on", "--prompt", "x"]) == 0
        out = capsys.readouterr().out
        assert out.index("The cat sat onThe cat sat on") < out.index("xx")

    def test_the_prompt_may_come_through_a_pipe(self, folder, clients, monkeypatch, capsys):
        type_in(monkeypatch, "Hello \n")
        assert main(["generate", "--model", folder]) == 0
        assert f"Hello {ANSWER_TEXT}" in capsys.readouterr().out

    def test_options_reach_sampler_and_engine(self, folder, clients):
        argv = ["generate", "--model", folder, "--prompt", "x", "--temperature", "0.5", "--top-k", "3", "--stop", "a"]
        argv += ["--stop", "b", "--max-tokens", "9", "--seed", "5", "--ignore-eos", "--max-model-len", "99", "--n", "2"]
        argv += ["--no-enable-prefix-caching", "--gpu-memory-utilization", "0.25", "--stop-token-ids", "3"]
        assert main(argv) == 0
        (client,) = clients
        params = client.requests[0].sampling_params
        assert (params.temperature, params.top_k, params.stop) == (0.5, 3, ["a", "b"])
        assert (params.max_tokens, params.seed, params.ignore_eos, params.stop_token_ids) == (9, 5, True, [3])
        assert len(client.requests) == 2
        assert client.config.model.max_model_len == 99
        assert client.config.model.seed == 5
        assert client.config.cache.enable_prefix_caching is False
        assert client.config.cache.memory_utilization == 0.25

    @pytest.mark.parametrize(("given", "seed"), [(["--seed", "7"], 7), ([], None)])
    def test_a_server_takes_the_engines_seed(self, given, seed):
        parser = argparse.ArgumentParser()
        arguments.add_engine_arguments(parser)
        assert arguments.engine_args(parser.parse_args(["--model", "x", *given])).seed == seed

    def test_the_engine_is_closed_at_the_end(self, folder, clients):
        main(["generate", "--model", folder, "--prompt", "x"])
        assert clients[0].is_shut_down

    def test_ctrl_c_exits_with_130(self, folder, clients, monkeypatch, capsys):
        def interrupted(engine):
            raise KeyboardInterrupt

        monkeypatch.setattr("mvllm.engine.llm_engine.LLMEngine._run_step", interrupted)
        assert main(["generate", "--model", folder, "--prompt", "x"]) == 130
        assert "Traceback" not in capsys.readouterr().err
        assert clients[0].is_shut_down


class TestUsage:
    def test_without_a_command(self, capsys):
        assert "no command is given" in usage_error([], capsys)


class TestEnvironment:
    def test_a_misspelt_environment_variable_is_reported(self, folder, clients, monkeypatch, caplog):
        monkeypatch.setenv("MVLLM_PLATFROM", "x")
        with caplog.at_level("WARNING", logger="mvllm"):
            main(["generate", "--model", folder, "--prompt", "Hello"])
        assert "MVLLM_PLATFROM" in caplog.text
        assert "Did you mean MVLLM_PLATFORM?" in caplog.text


def test_json_objects_are_read(folder, clients):
    overrides = json.dumps({"max_position_embeddings": 128})
    assert main(["generate", "--model", folder, "--prompt", "x", "--hf-overrides", overrides]) == 0
    assert clients[0].config.model.max_model_len == 128


@pytest.mark.parametrize(
    "command",
    [["generate"], ["serve"], ["doctor"]],
    ids=lambda command: command[0],
)
def test_every_command_accepts_the_model_as_positional_argument(command):
    check_positional_model(command)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("32k", 32000),
        ("32K", 32768),
        ("25.6k", 25600),
        ("1M", 2**20),
        ("2g", 2 * 10**9),
        ("-1", -1),
        ("64MB", 64 * 10**6),
        ("64MiB", 2**26),
        ("1.5 gib", 3 * 2**29),
        ("2tb", 2 * 10**12),
        ("64M", 2**26),
    ],
)
def test_large_numbers_may_have_a_unit_suffix(text, number):
    assert human_readable_int(text) == number


def test_the_engine_gets_them(folder, clients):
    limits = ["--max-model-len", "0.1k", "--max-num-batched-tokens", "4K", "--kv-cache-memory-bytes", "64M"]
    assert main(["generate", folder, "--prompt", "x", "--max-tokens", "0.002k", *limits]) == 0
    config = clients[0].config
    assert (config.model.max_model_len, config.scheduler.max_num_batched_tokens) == (100, 4096)
    assert config.cache.kv_cache_memory_bytes == 64 << 20
    assert clients[0].requests[0].sampling_params.max_tokens == 2


@pytest.mark.parametrize("words", [[], ["generate"], ["serve"]])
def test_the_usage_is_one_line(words, capsys):
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith(f"usage: {' '.join(['mvllm', *words])} ") and first.endswith(" [OPTION ...]")
    assert not second.strip() and len(first) < 100
    required = {"generate": "[MODEL]"}
    assert required.get(" ".join(words), "") in first


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["generate", "--model", "x", "--no-such", "1"], "unrecognized arguments: --no-such"),
        (["generate", "demo", "--dtype", "flot16"], "choose from auto, float32"),
        (["generate", "demo", "--dtype", "flot16"], "Did you mean float16?"),
        (["generate", "demo", "--model", "other"], "two models are given, 'demo' and --model 'other'; give one"),
        (["generate", "--model", "other", "demo"], "two models are given, 'demo' and --model 'other'; give one"),
        (
            ["generate", "demo", "--max-model-len", "32q"],
            "must be an integer or 'auto', found '32q'. 32k stands for 32,000",
        ),
        (["generate", "demo", "--max-model-len", "1.5K"], "must be an integer or 'auto', found '1.5K'"),
    ],
)
def test_wrong_usage_prints_two_lines(argv, words, capsys):
    lines = usage_error(argv, capsys).strip().splitlines()
    assert words in lines[0]
    assert "--help" in lines[1] and len(lines) == 2


def test_the_package_is_a_program():
    done = subprocess.run([sys.executable, "-m", "mvllm", "--version"], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("mvllm "), done.stderr


@pytest.mark.parametrize(
    ("command", "part"), [(command, part) for part, commands in PART_COMMANDS.items() for command in commands]
)
def test_a_command_of_a_missing_package_names_it(command, part, monkeypatch, capsys):
    list_plugins = plugin_groups.list_plugins
    monkeypatch.setattr(
        plugin_groups, "list_plugins", lambda group: [] if group is plugin_groups.COMMANDS else list_plugins(group)
    )
    monkeypatch.setattr(installable, "_installed_version", lambda package: None)
    assert main([command, "x"]) == 1
    assert capsys.readouterr().err == (
        f"error: `mvllm {command}` needs the package mvllm-{part}, which is not installed. "
        f"Run: {install_command(f'mvllm-{part}')}\n"
    )
