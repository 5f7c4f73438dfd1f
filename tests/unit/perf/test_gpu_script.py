"""`python -m tests.gpu`: the results that it stores, its model sizes, its trace analysis, and a run."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.gpu import __main__ as script
from tests.gpu import installed
from tests.gpu.bench import FULL, alike_requests, chat_requests
from tests.gpu.compiler_cache import ARCHIVE, VARIABLE, kept_compiler_cache, pack
from tests.gpu.models import CONFIGS, Size, prepare_model, tensors
from tests.gpu.presets import Step, run_steps
from tests.gpu.result_log import FAILED, MEASURED, NOT_RUN, OK, ResultLog, Row
from tests.gpu.runner import Runner
from tests.gpu.settings import ROOT, Item, Settings
from tests.gpu.trace import kernel_table, longest_kernels, read_events
from tests.gpu.zoo import zoo_checkpoint
from tests.helpers.processes import wait_until
from tests.unit.perf import gpu_part


def settings_for(folder: Path, *, budget: float = 300.0, only: tuple[str, ...] = ()) -> Settings:
    return Settings("cpu", folder / "out", folder / "scratch", time.monotonic() + budget, quick=True, only=only)


# -------------------------------------------------------------------------------------------------- results of a run


def test_every_row_is_in_the_files_as_soon_as_it_is_added(tmp_path: Path) -> None:
    result_log = ResultLog(tmp_path)
    result_log.add(
        Row("bench", "ceilings", "ceilings", MEASURED, {"copy_gb_s": 4321.0}, "copies\nof 4 GiB | both ways")
    )
    result_log.add(Row("parity", "a:b", "a:b", FAILED, {"off": 0.5}))
    table = (tmp_path / "table.md").read_text()
    assert "| bench | ceilings | measured | copy_gb_s 4,321 | copies of 4 GiB \\| both ways |" in table
    assert "0 ok, 1 measured, 1 failed, 0 not run." in table
    assert [row["name"] for row in json.loads((tmp_path / "parity.json").read_text())] == ["a:b"]
    assert ResultLog(tmp_path).figures("bench", "ceilings") == {"copy_gb_s": 4321.0}


def test_a_truncated_line_does_not_affect_the_others(tmp_path: Path) -> None:
    result_log = ResultLog(tmp_path)
    result_log.add(Row("oom", "load", "load", OK))
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"part": "oom", "it')
    assert [row.name for row in result_log.rows()] == ["load"]
    result_log.add(Row("oom", "serve", "serve", OK))
    assert [row.name for row in result_log.rows()] == ["load", "serve"]
    result_log.start_anew()
    assert result_log.rows() == [] and not (tmp_path / "oom.json").exists()


def test_items_that_fail_exit_or_hang_do_not_affect_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    settings = settings_for(tmp_path)
    result_log = ResultLog(settings.out)
    runner = Runner(settings, result_log)
    late = runner.run("tests.unit.perf.gpu_part", gpu_part.items(settings))
    runner.report_not_run("tests.unit.perf.gpu_part", late)
    rows = {(row.name, row.status): row for row in result_log.rows()}
    assert list(rows) == [
        ("passes", OK),
        ("asserts", FAILED),
        ("goes on", OK),
        ("raises", FAILED),
        ("comes after", OK),
        ("dies", OK),
        ("dies", FAILED),
        ("comes last", OK),
        ("hangs", OK),
        ("hangs", FAILED),
        ("too long", NOT_RUN),
    ]
    pid = {name: row.figures["pid"] for (name, status), row in rows.items() if status == OK}
    assert pid["passes"] == pid["goes on"], "an assertion that fails leaves its process as it was"
    assert pid["goes on"] != pid["comes after"] and pid["dies"] != pid["comes last"]
    assert rows["asserts", FAILED].note == "seven is not eight"
    assert rows["raises", FAILED].note == "RuntimeError: the device is gone"
    assert rows["dies", FAILED].note.startswith("its process ended with status 7")
    assert rows["hangs", FAILED].note.startswith("not done after")
    assert "s left, it needs about 1000000000 s" in rows["too long", NOT_RUN].note


def test_parallel_items_lose_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    settings = settings_for(tmp_path)
    result_log = ResultLog(settings.out)
    items = [item for item in gpu_part.items(settings) if item.name != "hangs"]
    late = Runner(settings, result_log).run("tests.unit.perf.gpu_part", items, side_by_side=3)
    rows = result_log.rows()
    assert [item.name for item in late] == ["too long"]
    assert {row.name for row in rows} == {item.name for item in items[:-1]}
    assert sorted(row.status for row in rows) == sorted([OK] * 5 + [FAILED] * 3)
    pid = {row.name: row.figures["pid"] for row in rows if row.status == OK}
    assert len({pid["passes"], pid["goes on"], pid["dies"]}) >= 2, "not all in one process"
    table = (settings.out / "table.md").read_text()
    assert sum("gpu_part" in line for line in table.splitlines()) == len(rows)


def test_concurrent_processes_get_a_complete_checkpoint_of_the_zoo(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    settings.scratch.mkdir(exist_ok=True)
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: zoo_checkpoint("llama-gqa", settings), range(4)))
    assert len(set(folders)) == 1 and (folders[0] / "model.safetensors").stat().st_size > 100_000


def test_a_run_that_is_killed_keeps_its_rows_and_leaves_no_process(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, only=("leaves",))
    code = (
        "import sys; from tests.gpu.result_log import ResultLog; from tests.gpu.runner import Runner\n"
        "from tests.gpu.settings import Settings; from tests.unit.perf import gpu_part\n"
        "settings = Settings.from_json(sys.argv[1])\n"
        "Runner(settings, ResultLog(settings.out)).run(gpu_part.__name__, gpu_part.items(settings))"
    )
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", code, settings.to_json()]
    run = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
    result_log = ResultLog(settings.out)
    written = settings.out / "table.md"  # starts after its row is written
    wait_until(written.exists, 60, "no table")
    run.kill()
    run.wait()
    [row] = result_log.rows()
    wait_until(
        lambda: not any(is_alive(row.figures[name]) for name in ("pid", "other")), 120, f"of {row.figures} one lives"
    )
    assert row.status == OK and "leaves a process" in written.read_text()


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_without_a_time_budget_nothing_is_started_and_all_items_are_reported_as_missing(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, budget=-1, only=("asserts", "dies"))
    result_log = ResultLog(settings.out)
    run_steps([Step("tests.unit.perf.gpu_part")], Runner(settings, result_log), settings, result_log, budget=1)
    assert [(row.name, row.status) for row in result_log.rows()] == [("asserts", NOT_RUN), ("dies", NOT_RUN)]


def test_a_resumed_run_skips_done_items_and_repeats_failed_ones(tmp_path: Path) -> None:
    first, second = ResultLog(tmp_path / "first"), ResultLog(tmp_path / "second")
    for name, status in (("whole", OK), ("failed", FAILED)):
        first.add(Row("parity", name, name, status))
        first.mark_done("parity", name)
    first.add(Row("parity", "cut off", "cut off", OK))
    second.continue_from(first.folder)
    assert [row.name for row in second.rows()] == ["whole", "failed", "cut off"]
    names = ("whole", "failed", "cut off", "new")
    assert [second.is_done("parity", Item(name, 1, 1)) for name in names] == [True, False, False, False]


def test_compiled_kernels_are_kept_while_a_run_goes_on_and_used_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    first, second = tmp_path / "first", tmp_path / "second"
    with kept_compiler_cache(first, tmp_path, seconds=0.02):
        assert os.environ[VARIABLE] == str(first)
        (first / "kernel").mkdir()
        (first / "kernel" / "attend.cubin").write_bytes(b"code")

        def kept() -> bool:
            path = tmp_path / ARCHIVE
            return path.exists() and "kernel/attend.cubin" in tarfile.open(path).getnames()

        wait_until(kept, 60, "not copied while the run goes on")
    assert VARIABLE not in os.environ
    with kept_compiler_cache(second, tmp_path):
        assert (second / "kernel" / "attend.cubin").read_bytes() == b"code"


def test_kernels_that_a_compiler_is_writing_are_left_out(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name in ("kernel/attend.cubin", "kernel/tmp.pid_7_ab/attend.ptx"):
        (cache / name).parent.mkdir(parents=True)
        (cache / name).write_bytes(b"code")
    pack(cache, tmp_path)
    with tarfile.open(tmp_path / ARCHIVE) as archive:
        assert archive.getnames() == ["kernel/attend.cubin"]


@pytest.mark.parametrize("arguments", [["--budget", "581"], ["--budget", "0"], ["--resume", "/nowhere"], ["velocity"]])
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.parse(arguments)
    assert arguments[-1] in capsys.readouterr().err


def test_wheels_are_found_in_the_usual_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "ROOT", tmp_path)
    (tmp_path / "wheels").mkdir()
    assert script.default_wheels() is None
    (tmp_path / ".whl").mkdir()
    (tmp_path / ".whl" / "a-1-py3-none-any.whl").touch()
    assert script.default_wheels() == tmp_path / ".whl"


# ------------------------------------------------------------------------------------------------- limits of the device


def test_model_sizes_equal_the_published_ones() -> None:
    def weights(name: str) -> int:
        return sum(math.prod(shape) for _, shape in tensors(CONFIGS[name]))

    assert weights("llama-3.1-8b") == 8_030_261_248
    assert weights("qwen3-0.6b") == 596_049_920
    assert weights("qwen3-30b-a3b") == 30_532_122_624
    sparse = Size.of(CONFIGS["qwen3-30b-a3b"])
    active = sparse.dense + 2 * sparse.head + sparse.experts * sparse.experts_per_token // sparse.num_experts
    assert 3.3e9 < active < 3.4e9


def test_a_decode_step_reads_the_weights_the_kv_cache_and_the_expected_number_of_experts() -> None:
    dense = Size.of(CONFIGS["llama-3.1-8b"])
    one, many = dense.step_bytes(1, 0), dense.step_bytes(64, 1000)
    assert one == 2 * (8_030_261_248 - 128256 * 4096), "all but the embedding, of which a row is read"
    assert many - one == 64 * 1000 * 32 * 2 * 8 * 128 * 2
    sparse = Size.of(CONFIGS["qwen3-30b-a3b"])
    experts = [(sparse.step_bytes(batch, 0) / 2 - sparse.dense - sparse.head) / sparse.experts for batch in (1, 2, 256)]
    assert experts[0] == pytest.approx(8 / 128) and experts[1] == pytest.approx(1 - (120 / 128) ** 2)
    assert experts[2] == pytest.approx(1.0, abs=1e-6)


def test_the_bound_of_a_step_is_that_of_each_product() -> None:
    size = Size.of(CONFIGS["llama-3.1-8b"])
    copied, multiplied = 4e12, 8e14
    few, many = size.step_seconds(1, 500, copied, multiplied), size.step_seconds(4096, 0, copied, multiplied)
    assert few == pytest.approx(size.step_bytes(1, 500) / copied), "products of few rows read their weights"
    assert many == pytest.approx(2 * 4096 * (size.dense + size.head) / multiplied, rel=1e-3), "of many rows compute"
    between = size.step_seconds(256, 500, copied, multiplied)
    assert between > size.step_bytes(256, 500) / copied


def test_a_prompt_has_two_operations_per_weight_and_token_plus_attention() -> None:
    size = Size.of(CONFIGS["llama-3.1-8b"])
    layers = 8_030_261_248 - 2 * 128256 * 4096
    pairs = 3 * 32 * 32 * 2 * 128  # of three positions: 1 + 2 + 3 pairs; two products each
    assert size.prompt_operations(3) == pytest.approx(2 * (layers * 3 + 128256 * 4096) + 2 * 2 * pairs, rel=1e-6)


def test_request_lengths_are_distributed_like_conversations_and_reproducible() -> None:
    requests = chat_requests(1000, 1000, FULL)
    prompts, outputs = [len(prompt) for prompt, _ in requests], [output for _, output in requests]
    assert 150 < sum(prompts) / 1000 < 250 and 150 < sum(outputs) / 1000 < 250
    assert max(prompts) <= 1024 and max(p + o for p, o in zip(prompts, outputs)) <= 2048
    found, length = alike_requests(FULL, 1000)
    assert found == [prompt for prompt, _ in requests[:200]] and length == round(sum(outputs[:200]) / 200)


def test_a_checkpoint_matches_its_config_and_is_replaced_by_another(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    first, load_format = prepare_model("tiny", tmp_path / "models")
    assert load_format == "safetensors" and prepare_model("tiny", tmp_path / "models")[0] == first
    index = json.loads((first / "model.safetensors.index.json").read_text())["weight_map"]
    with safetensors.safe_open(first / "model-00001.safetensors", "numpy") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert shapes == dict(tensors(CONFIGS["tiny"])) and set(index) == set(shapes)
    second, _ = prepare_model("tiny-experts", tmp_path / "models")
    assert not first.exists() and (second / "tokenizer.json").exists()


def test_device_idle_time_and_host_wait_time_are_read_from_a_trace() -> None:
    def event(kind: str, name: str, begin: float, length: float) -> dict:
        return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": length}

    found = read_events(
        [
            event("cpu_op", "aten::mm", 0, 500),
            event("kernel", "second", 110, 40),
            event("kernel", "first", 0, 100),
            event("gpu_memcpy", "beside it", 20, 90),
            event("kernel", "after a pause", 250, 10),
            event("cuda_runtime", "cudaGraphLaunch", 5, 3),
            event("hip_runtime", "hipEventSynchronize", 30, 70),
            {"ph": "i", "cat": "kernel", "name": "no span", "ts": 900},
        ]
    )
    assert found.busy == 160 and found.gaps == (100,) and found.waits == 70 and found.launches == 1


def test_the_longest_kernels_are_listed_per_step() -> None:
    events = [{"ph": "X", "cat": "kernel", "name": name, "ts": 0, "dur": us} for name, us in [("a", 4), ("b", 9)] * 4]
    events.append({"ph": "X", "cat": "cpu_op", "name": "host", "ts": 0, "dur": 100})
    kernels = longest_kernels(events)
    assert kernels == [("b", 4, 36.0), ("a", 4, 16.0)]
    assert "| `b` | 2.0 | 9.0 | 18.0 |" in kernel_table(kernels, steps=2)
    assert longest_kernels(events, most=1) == kernels[:1]


# ---------------------------------------------------------------------------------------------------------- platforms


def test_a_platform_that_is_not_installed_is_found_in_the_working_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(installed, "_is_installed", lambda name: False)
    wheel = tmp_path / "wheels" / "carried-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("carried.py", "VALUE = 3\n")
        archive.writestr("carried-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        archive.writestr(
            "carried-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("carried-1.0.dist-info/RECORD", "")
    (wheel.parent / "mvllm_cuda-9.9-py3-none-any.whl").touch()  # the project's own are for the part `wheels`
    installed.install(tmp_path / "here", wheel.parent, "cuda")
    found = importlib.metadata.entry_points(group="mvllm.platforms", name="cuda")
    assert [point.value for point in found] == ["mvllm_cuda.plugin"]
    code = "import carried, mvllm, mvllm_cuda; print(carried.VALUE, mvllm.__file__)"
    said = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=tmp_path).split()
    assert said == ["3", str(ROOT / "core" / "mvllm" / "__init__.py")]
