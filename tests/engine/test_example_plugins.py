"""The example plugins that are not platforms, installed together: each does its job."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from mvllm import LLM, SamplingParams
from mvllm.entrypoints.cli.main import main
from mvllm.errors import ConfigError, ModelError, RequestError
from mvllm.ops.provider_plugins import installed_providers
from mvllm.ops.registry import OpTable
from mvllm.platform.choose import choose_platform
from mvllm.platform.phases import Phase, enter_phase
from tests.helpers.model_zoo import load_reference, make_checkpoint
from tests.helpers.plugins import ROOT, prepend, write_metadata

PROMPTS = [[5, 6, 7], [90, 1], list(range(40)), [11] * 17]
GUESSING = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
EXAMPLES = (
    "example-model",
    "example-executor",
    "example-logits-processor",
    "example-ops",
    "example-quantization",
    "example-stat-logger",
)


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """All examples, installed from the repository with the entry points of their pyproject.toml."""
    paths = []
    for name in EXAMPLES:
        declared = tomllib.loads((ROOT / "plugins" / name / "pyproject.toml").read_text())["project"]
        points = "".join(
            f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
            for group, entries in declared["entry-points"].items()
        )
        paths += [str(write_metadata(tmp_path / "site", declared["name"], points))]
        paths += [str(ROOT / "plugins" / name / "src")]
    prepend(monkeypatch, list(dict.fromkeys(paths)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def model(examples) -> Path:
    from mvllm_example_model.checkpoint import write_checkpoint

    return write_checkpoint(examples / "model")


def generate(model, prompts=PROMPTS, **settings):
    settings = {"kv_cache_memory_bytes": 1 << 22, "skip_tokenizer_init": True, "platform": "cpu", **settings}
    with LLM(str(model), use_tqdm_on_load=False, dtype="float32", **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def plain_forward(weights: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """Logits of the last token, computed directly: no cache, no batch, no engine layers."""

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weights[f"{name}.weight"]

    def heads(x, name, count):
        return F.linear(x, weights[f"{name}.weight"]).view(len(ids), count, 8).transpose(0, 1)

    x = weights["tokens.weight"][ids] + weights["positions.weight"][: len(ids)]
    for layer in range(3):
        name = f"blocks.{layer}"
        normed = norm(x, f"{name}.norm")
        query = heads(normed, f"{name}.query", 4)
        key, value = (heads(normed, f"{name}.{kind}", 2).repeat_interleave(2, 0) for kind in ("key", "value"))
        scores = (query @ key.transpose(1, 2)) / 8**0.5
        hidden = torch.ones(len(ids), len(ids)).triu(1).bool()
        attended = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(0, 1).flatten(1)
        inner = F.gelu(F.linear(normed, weights[f"{name}.up.weight"]))
        x = x + F.linear(attended, weights[f"{name}.output.weight"]) + F.linear(inner, weights[f"{name}.down.weight"])
    return F.linear(norm(x, "final_norm"), weights["head.weight"])[-1]


def expected(prompts=PROMPTS, num_tokens=24) -> list[list[int]]:
    from mvllm_example_model.checkpoint import make_weights

    weights = {name: weight.double() for name, weight in make_weights().items()}
    answers = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(num_tokens):
            ids.append(int(plain_forward(weights, ids).argmax()))
        answers.append(ids[len(prompt) :])
    return answers


class TestModel:
    def test_its_tokens_are_those_of_a_plain_forward_in_torch(self, model):
        assert generate(model) == expected()

    def test_tokens_are_the_same_with_chunks_preemption_and_a_cached_prefix(self, model):
        prompts = [*PROMPTS, [*range(40), 3]]
        tight = {"max_num_batched_tokens": 9, "max_num_seqs": 3, "max_model_len": 80, "kv_cache_memory_bytes": 49152}
        assert generate(model, prompts, **tight) == expected(prompts)

    @pytest.mark.parametrize(
        "sizes",
        [{"tensor_parallel_size": 2}, pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.exhaustive)],
        ids=str,
    )
    def test_tokens_are_the_same_with_two_workers_that_load_the_plugin(self, model, sizes):
        assert generate(model, **sizes) == expected()

    def test_its_record_is_read_without_its_model(self, model):
        script = (
            "import sys; from pathlib import Path; from mvllm.config.model_builder import build_model_config;"
            f"config = build_model_config(model='m', folder=Path({str(model)!r}), tokenizer=None);"
            "assert config.hf_config.positive_int('intermediate_size') == 64;"
            "sys.exit('mvllm_example_model.model' in sys.modules or 'torch' in sys.modules)"
        )
        subprocess.run([sys.executable, "-c", script], check=True, env=os.environ | {"PYTHONPATH": ":".join(sys.path)})

    def test_without_the_plugin_the_error_lists_what_is_supported(self, model, monkeypatch):
        for name in EXAMPLES:
            sys.path.remove(str(ROOT / "plugins" / name / "src"))
        sys.path.remove(str(model.parent / "site"))
        with pytest.raises(ModelError, match="'ParallelBlockForCausalLM' is not supported"):
            generate(model)

    def test_outside_the_allow_list_it_is_rejected_with_the_name_of_its_package(self, model, monkeypatch):
        monkeypatch.setenv("MVLLM_PLUGINS", "mvllm-example-ops")
        with pytest.raises(ConfigError, match=r"mvllm-example-model 0\.1\.0"):
            generate(model)


class TestExecutor:
    def test_it_records_every_step_and_changes_no_token(self, model, monkeypatch, tmp_path):
        monkeypatch.setenv("EXAMPLE_EXECUTOR_RECORD", str(tmp_path / "record"))
        assert generate(model, distributed_executor_backend="recording") == expected()
        lines = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
        assert len(lines) >= 24 and [line["step"] for line in lines] == sorted({line["step"] for line in lines})


class TestOps:
    def test_they_run_if_requested_and_change_no_token(self, model, monkeypatch):
        import mvllm_example_ops

        calls = []
        true_norm = mvllm_example_ops.rms_norm
        monkeypatch.setattr(mvllm_example_ops, "rms_norm", lambda *a: calls.append(1) or true_norm(*a))
        assert generate(model) == expected() and not calls
        assert generate(model, op_providers="torch-norms") == expected() and calls

    def test_they_precede_those_of_the_platform(self, examples):
        platform = choose_platform("cpu").platform
        with enter_phase(Phase.WORKER):
            table = OpTable.resolve(platform.ops(), installed_providers(["torch-norms"]))
        [row] = [row for row in table.describe() if row.op == "rms_norm"]
        assert row.candidates[0] == "torch-rms-norm"

    def test_an_unknown_op_set_is_rejected_before_loading(self, model):
        with pytest.raises(ConfigError, match=r"'warp'.*There are: torch-norms"):
            generate(model, op_providers="warp")


class TestQuantization:
    @pytest.fixture
    def checkpoints(self, examples) -> tuple[Path, Path]:
        """A ternary checkpoint, and the same weights as floats."""
        from mvllm_example_quantization.checkpoint import convert
        from mvllm_example_quantization.matrix import unpack

        plain = make_checkpoint("llama-gqa", examples / "plain", tokenizer=False)
        ternary = convert(plain, examples / "ternary")
        tensors = load_file(ternary / "model.safetensors")
        for name in [name for name in tensors if name.endswith(".ternary")]:
            module = name.removesuffix(".ternary")
            tensors[f"{module}.weight"] = unpack(tensors.pop(name), tensors.pop(f"{module}.scale"))
        save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
        return ternary, plain

    @pytest.mark.parametrize(
        "sizes", [{}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.exhaustive)], ids=str
    )
    def test_its_tokens_are_those_of_the_same_weights_as_floats(self, checkpoints, sizes):
        ternary, plain = checkpoints
        assert generate(ternary, **sizes) == generate(plain)

    def test_its_record_is_read_without_its_model(self, model):
        script = (
            "import sys; from pathlib import Path; from mvllm.config.model_builder import build_model_config;"
            f"config = build_model_config(model='m', folder=Path({str(model)!r}), tokenizer=None);"
            "assert config.hf_config.positive_int('intermediate_size') == 64;"
            "sys.exit('mvllm_example_model.model' in sys.modules or 'torch' in sys.modules)"
        )
        subprocess.run([sys.executable, "-c", script], check=True, env=os.environ | {"PYTHONPATH": ":".join(sys.path)})

    def test_without_the_plugin_the_error_lists_what_is_supported(self, checkpoints):
        sys.path.remove(str(ROOT / "plugins" / "example-quantization" / "src"))
        sys.path.remove(str(checkpoints[0].parent / "site"))
        with pytest.raises(ModelError, match=r"'ternary', which is not supported\. Supported: awq"):
            generate(checkpoints[0])

    def test_outside_the_allow_list_it_is_rejected_with_the_name_of_its_package(self, checkpoints, monkeypatch):
        monkeypatch.setenv("MVLLM_PLUGINS", "mvllm-example-ops")
        with pytest.raises(ConfigError, match=r"mvllm-example-quantization 0\.1\.0"):
            generate(checkpoints[0])

    def test_its_unsupported_reasons_are_raised_before_loading(self, checkpoints):
        ternary, _ = checkpoints
        with pytest.raises(ModelError, match="'ignore' should be a list of module names, found 'lm_head'"):
            generate(ternary, hf_overrides={"quantization_config": {"quant_method": "ternary", "ignore": "lm_head"}})

    def test_it_is_rejected_for_an_unquantized_checkpoint(self, checkpoints):
        with pytest.raises(ConfigError, match=r"'ternary', which is a way to store weights.*quantization='int8'"):
            generate(checkpoints[1], quantization="ternary")


class TestStatLogger:
    def test_it_writes_a_line_per_step_and_the_command_summarizes_them(self, model, capsys):
        generate(model, stat_loggers="csv")
        with open("stats.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert sum(int(row["new_tokens"]) for row in rows) == 24 * len(PROMPTS)
        assert max(int(row["running"]) for row in rows) == len(PROMPTS)
        capsys.readouterr()
        assert main(["stats", "stats.csv"]) == 0
        assert f"tokens          {24 * len(PROMPTS)}" in capsys.readouterr().out

    def test_it_does_nothing_unless_requested(self, model):
        generate(model)
        assert not Path("stats.csv").exists()


FAILING = """
import torch
from mvllm.extension_api import LogitsProcessor

class Failing(LogitsProcessor):
    def add_row(self, row, params, tokens):
        self.what = {**getattr(self, "what", {}), row: (params.extra_args or {}).get("fail")}
        if self.what[row] == "add":
            raise ValueError("not this one")
        return True

    def apply(self, logits, rows):
        kinds = [self.what[row] for row in rows]
        if "apply" in kinds:
            logits.fill_(0.0)
            raise ZeroDivisionError("at row " + str(rows[kinds.index("apply")]))
        if "shape" in kinds:
            return logits[:, :-1]
        logits[[kind == "nan" for kind in kinds]] = torch.nan
        return logits
"""


def recorded_plans(llm, monkeypatch):
    """The plans that its scheduler makes from now on."""
    scheduler, plans = llm.llm_engine._client._core.scheduler, []
    commit = scheduler._commit_plan
    monkeypatch.setattr(scheduler, "_commit_plan", lambda step: plans.append(commit(step)) or plans[-1])
    return plans


class TestLogitsProcessor:
    @pytest.mark.parametrize(
        "settings",
        [{}, {"async_scheduling": True}, {"async_scheduling": True, "speculative_config": GUESSING}],
        ids=str,
    )
    def test_its_tokens_are_those_of_transformers(self, examples, settings, monkeypatch):
        folder = make_checkpoint("llama-gqa", examples / "llama", tokenizer=False)
        reference = load_reference(folder)

        def expected(prompt, size):
            ids = torch.tensor([prompt])
            found = reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None,
                pad_token_id=0, no_repeat_ngram_size=size,
            )  # fmt: skip
            return found[0, len(prompt) :].tolist()

        sizes = [2, None, 1, 3]
        params = [
            SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False, extra_args=extra)
            for extra in ({"no_repeat_ngram_size": 2}, None, {"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 3})
        ]
        with small_llm(folder, logits_processors="no-repeat-ngram", max_num_seqs=2, **settings) as llm:
            found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]
            with pytest.raises(RequestError, match="rejects the request: no_repeat_ngram_size must be"):
                bad = SamplingParams(extra_args={"no_repeat_ngram_size": 0})
                llm.generate(PROMPTS[0], bad, use_tqdm=False)
            plans = recorded_plans(llm, monkeypatch)
            llm.generate(PROMPTS[0], params[0], use_tqdm=False)
            assert len(plans) >= 24 and sum(bool(plan.draft_token_ids) for plan in plans) <= 1
        assert found == [expected(prompt, size) for prompt, size in zip(PROMPTS, sizes, strict=True)]

    def test_a_failing_logits_processor_fails_only_its_own_requests(self, examples):
        site = write_metadata(examples / "site", "acme", "[mvllm.logits_processors]\nfailing = acme_fails:Failing\n")
        (site / "acme_fails.py").write_text(FAILING)
        folder = make_checkpoint("llama-gqa", examples / "llama", tokenizer=False)
        kinds = ["add", None, "apply", "shape", "nan"]
        common = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(**common, extra_args={"fail": kind}) for kind in kinds]
        with small_llm(folder, logits_processors="failing") as llm:
            outputs = [
                output.outputs[0]
                for output in llm.generate([[5, 6, 7]] * 5, params, use_tqdm=False, raise_on_error=False)
            ]
            again = llm.generate([5, 6, 7], SamplingParams(**common), use_tqdm=False)[0].outputs[0]
        assert [output.finish_reason for output in outputs] == ["error", "length", "error", "error", "error"]
        assert outputs[1].token_ids == again.token_ids
        for at, text in {
            0: "ValueError: not this one",
            2: "ZeroDivisionError: at row",
            3: "TypeError: apply",
            4: "NaN",
        }.items():
            assert text in outputs[at].error, outputs[at].error
            assert at == 4 or "the logits processor 'failing'" in outputs[at].error

    def test_an_invalid_logits_processor_is_rejected_before_loading(self, examples):
        site = write_metadata(examples / "site", "acme", "[mvllm.logits_processors]\nnone = json:dumps\n")
        assert site.exists()
        folder = make_checkpoint("llama-gqa", examples / "llama", tokenizer=False)
        (folder / "model.safetensors").unlink()
        with pytest.raises(ConfigError, match=r"acme 0\.1\.0 .*must name a subclass of mvllm.extension_api.LogitsProc"):
            small_llm(folder, logits_processors="none")
        with pytest.raises(ConfigError, match="offers a logits processor 'nobody'"):
            small_llm(folder, logits_processors="nobody")


def small_llm(folder, **settings):
    common = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 22, "skip_tokenizer_init": True, "platform": "cpu"}
    return LLM(str(folder), use_tqdm_on_load=False, **common, **settings)
