"""Presets of `python -m tests.gpu`: their order, a budget that ends in between, the archive, and a resumed run."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mvllm import plugin_groups
from tests.gpu import __main__ as script
from tests.gpu import archive, conformance, kernels, library_kernels, presets, sanitizer, speed, wheels
from tests.gpu.clock import Clock, Repeated
from tests.gpu.models import CONFIGS, checkpoint_bytes, stored
from tests.gpu.parts import PARTS, load
from tests.gpu.presets import PRESETS, Preset, Step
from tests.gpu.result_log import FAILED, NOT_RUN, OK, ResultLog, Row
from tests.gpu.runner import Runner
from tests.gpu.settings import ROOT, Item, Settings
from tests.unit.perf import gpu_part

PART = "tests.unit.perf.gpu_part"
needs_suite = pytest.mark.skipif(
    plugin_groups.find(plugin_groups.ALIASES, "testing") is None,
    reason="these parts of tests.gpu run the suite of mvllm-conformance, which is not installed",
)


@dataclass
class SetClock:
    """A clock that tests set."""

    now: float = 1000.0

    def clock(self) -> Clock:
        return Clock(lambda: self.now, lambda: 1_000_000 + self.now)


def settings_for(folder: Path, platform: str = "interpreted", *, quick: bool = True) -> Settings:
    return Settings(platform, folder / "out", folder, float("inf"), quick=quick)


def names_in(file: Path) -> list[str]:
    with tarfile.open(file) as found:
        return found.getnames()


# ------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[tuple[str, str]]]]:
    """Runs a preset of three items, each of which takes 40 s of the clock. Returns status, and items with results."""
    steps = (Step(PART, ("second",)), Step(PART, ("f*",), share=0.5), Step(PART, ("third",)))
    monkeypatch.setitem(PRESETS, "three", Preset("three", "for a test", 300.0, steps))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(script, "install", lambda *unused: None)
    monkeypatch.setattr(script, "what_is_in_the_way", lambda platform: "")

    def go(out: str, *arguments: str) -> tuple[int, list[tuple[str, str]]]:
        folder = tmp_path / out
        earlier = 0

        def now() -> float:
            """Each row of this run has taken 40 s."""
            rows = folder / "rows.jsonl"
            return 40.0 * (len(rows.read_text().splitlines()) - earlier if rows.exists() else 0)

        resumed = arguments[arguments.index("--resume") + 1] if "--resume" in arguments else None
        if resumed is not None:
            earlier = len(ResultLog(tmp_path / "first").rows())
        options = ["--preset", "three", "--platform", "scripted", "--scratch", str(tmp_path), "--out", str(folder)]
        status = script.main([*options, *arguments], Clock(now, lambda: 5e8 + now()))
        return status, [(row.item, row.status) for row in ResultLog(folder).rows()]

    return go


def test_a_budget_that_ends_in_between_keeps_the_first_items_and_names_the_others(run, tmp_path: Path) -> None:
    status, rows = run("first", "--budget", "90", "--archive", str(tmp_path / "kept"))
    assert rows == [("second", OK), ("first", OK), ("third", NOT_RUN)] and status == 0
    left = [row.figures["left"] for row in ResultLog(tmp_path / "first").rows()[:2]]
    assert left == pytest.approx([90, 50], abs=2), "each item knows how much is left of the budget"
    table = (tmp_path / "first" / "table.md").read_text()
    assert "| 10 s left, it needs about 40 s |" in table
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {archive.ARCHIVE, "compiler-cache.tar.gz"}
    with tarfile.open(tmp_path / "kept" / archive.ARCHIVE) as kept:
        assert kept.extractfile("table.md").read().decode() == table
    assert not list(tmp_path.glob("gpu-run-*")), "checkpoints are removed"


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_a_resumed_preset_skips_what_was_done(run, tmp_path: Path, kind: str) -> None:
    run("first", "--budget", "90")
    earlier = tmp_path / "first" / ("" if kind == "folder" else archive.ARCHIVE)
    status, rows = run("second", "--resume", str(earlier))
    assert rows == [("second", OK), ("first", OK), ("third", NOT_RUN), ("third", OK)] and status == 0
    assert names_in(tmp_path / "second" / archive.ARCHIVE)[:3] == ["rows.jsonl", "items.txt", "table.md"]


def test_only_a_failure_of_this_run_is_its_exit_status(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def preset(*steps: Step) -> None:
        monkeypatch.setitem(PRESETS, "three", Preset("three", "for a test", 300.0, steps))

    preset(Step(PART, ("second",)), Step("tests.unit.perf.no_part"))
    with pytest.raises(ModuleNotFoundError):
        run("first")
    assert "rows.jsonl" in names_in(tmp_path / "first" / archive.ARCHIVE), "a run that breaks off has its archive"
    preset(Step(PART, ("raises",)))
    assert run("first") == (1, [("raises", FAILED)])
    preset(Step(PART, ("third",)))
    assert run("second", "--resume", str(tmp_path / "first"))[0] == 0, "the failure is an earlier run's"


def test_an_item_that_the_budget_cuts_off_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    settings = Settings("cpu", tmp_path, tmp_path, deadline=30.0, only=("leaves",))
    log = ResultLog(tmp_path)
    clock = Clock(lambda: 40.0 * len(log.rows()))  # its row takes longer than the budget
    assert not Runner(settings, log, clock).run(PART, gpu_part.items(settings))
    written, cut = log.rows()
    assert (written.status, cut.status) == (OK, NOT_RUN) and cut.note.startswith("the budget was over before")
    assert not log.is_done(PART, gpu_part.items(settings)[0])
    log.mark_done(PART, cut.item)
    assert not log.is_done(PART, gpu_part.items(settings)[0]), "its last row is the one that counts"


def test_what_a_step_had_no_share_for_is_run_when_all_had_their_turn(tmp_path: Path) -> None:
    clock, log = SetClock(), ResultLog(tmp_path)
    calls: list[list[str]] = []

    class Scripted:
        def run(self, part: str, items: list[Item], side_by_side: int, *, seconds: float = 1e9) -> list[Item]:
            until, late = clock.now + seconds, []
            for item in items:
                if clock.now + item.needs > until:
                    late.append(item)
                    continue
                clock.now += item.needs
                calls[-1:] = [[*calls[-1], item.name]] if calls else [[item.name]]
            calls.append([])
            return late

        def report_not_run(self, part: str, items: list[Item]) -> None:
            assert not items

    settings = Settings("scripted", tmp_path, tmp_path, 0.0)
    steps = [Step(PART, ("first", "second", "third"), share=0.5), Step(PART, ("third",))]
    presets.run_steps(steps, Scripted(), settings, log, budget=160)  # type: ignore[arg-type]
    assert [call for call in calls if call] == [["first", "second"], ["third"], ["third"]]


# ----------------------------------------------------------------------------------------------------------- archive


def test_the_archive_is_renewed_every_15_seconds(tmp_path: Path) -> None:
    log, clock = ResultLog(tmp_path / "out"), SetClock()
    file = tmp_path / archive.ARCHIVE
    renewed = Repeated(lambda: archive.pack(log.folder, file), archive.SECONDS, clock.clock())
    log.add(Row("parity", "a", "a", OK))
    clock.now += 14.9
    assert not renewed.poll() and not file.exists()
    clock.now += 0.1
    assert renewed.poll() and not renewed.poll()
    first = file.read_bytes()
    log.add(Row("parity", "b", "b", OK))
    assert file.read_bytes() == first
    clock.now += 15
    assert renewed.poll()
    archive.unpack(file, tmp_path / "unpacked")
    assert [row.item for row in ResultLog(tmp_path / "unpacked").rows()] == ["a", "b"]


def test_a_renewal_that_breaks_off_leaves_the_archive_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, file = ResultLog(tmp_path / "out"), tmp_path / archive.ARCHIVE
    log.add(Row("parity", "a", "a", OK))
    archive.pack(log.folder, file)
    before = file.read_bytes()

    def break_off(*unused: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(archive, "_add", break_off)
    with pytest.raises(KeyboardInterrupt):
        archive.pack(log.folder, file)
    assert file.read_bytes() == before


def test_what_makes_the_archive_too_large_is_left_out_and_named(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "out")
    log.add(Row("parity", "a", "a", OK))
    (log.folder / "logs").mkdir()
    (log.folder / "logs" / "parity.log").write_bytes(b"begin" + b"x" * archive.LARGEST_LOG)
    (log.folder / "trace-a.json.gz").write_bytes(os.urandom(40_000))
    (log.folder / "trace-b.json.gz").write_bytes(os.urandom(90_000))
    for other in ("compiler-cache.tar.gz", "lock", "done.txt.new"):
        (log.folder / other).write_bytes(b"none of it")
    file = log.folder / archive.ARCHIVE
    archive.pack(log.folder, file, largest=100_000)
    archive.pack(log.folder, file, largest=100_000)
    names = ["rows.jsonl", "table.md", "parity.json", "trace-a.json.gz", "logs/parity.log", "left-out.txt"]
    assert sorted(names_in(file)) == sorted(names) and file.stat().st_size < 100_000
    with tarfile.open(file) as found:
        assert found.extractfile("left-out.txt").read() == b"trace-b.json.gz: 90000 bytes\n"
        assert found.getmember("logs/parity.log").size == archive.LARGEST_LOG


# ------------------------------------------------------------------------------------------------ what presets contain


@needs_suite
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("platform", ["interpreted", "replayed", "cuda"])
@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_every_step_has_items_and_they_are_unique(preset: Preset, platform: str, quick: bool, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, platform, quick=quick)
    for step in preset.steps:
        assert step.part in PARTS and 0 < step.share <= 1
        names = [item.name for item in load(step.part).items(settings) if step.wants(item)]
        assert len(set(names)) == len(names) and "\n" not in "".join(names)
        assert names or step.items == ("cudnn*",), f"{step} has no items"


def test_items_that_need_a_device_say_so_on_the_host(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    for part in (sanitizer, library_kernels):
        assert {item.obstacle for item in part.items(settings)} == {
            "needs a device: platform interpreted runs on the host"
        }
    on_host = [item for item in kernels.items(settings) if item.obstacle]
    assert [item.name for item in on_host] == ["cudnn numerics"]
    obstacles = {item.name: item.obstacle for item in speed.items(settings)}
    assert all(obstacles[name] for name in speed.LARGE) and not any(obstacles[name] for name in speed.TINY)


def test_the_sanitizer_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "PLACES", (str(tmp_path),))
    settings = settings_for(tmp_path, "cuda")
    assert all("compute-sanitizer" in item.obstacle for item in sanitizer.items(settings))
    (tmp_path / sanitizer.TOOL).write_text("#!/bin/sh\necho '========= ERROR SUMMARY: 1 error'\nexit 9\n")
    (tmp_path / sanitizer.TOOL).chmod(0o755)
    items = [item for item in sanitizer.items(settings) if not item.obstacle]
    assert [item.name for item in items][:2] == ["attention decode, memcheck", "quantized linear, memcheck"]
    log = ResultLog(settings.out)
    (settings.out / "logs").mkdir()
    sanitizer.run(items[0].name, settings, log)
    [row] = log.rows()
    assert row.status == FAILED and row.note == "========= ERROR SUMMARY: 1 error"


def test_the_wheels_of_a_platform_are_those_it_needs(tmp_path: Path) -> None:
    names = {
        *("mvllm", "mvllm-cuda", "mvllm-gguf", "mvllm-parsers", "mvllm-tools", "mvllm-torch-gpu"),
        *("mvllm-transformers-backend", "mvllm-triton-kernels"),
    }
    assert set(wheels.distributions("replayed")) == set(wheels.distributions("cuda")) == names
    settings = Settings("cpu", tmp_path, tmp_path, 0.0, wheels=tmp_path)
    assert "--wheels dist" in wheels.items(settings)[0].obstacle
    for name in ("mvllm", "mvllm-cpu", "mvllm-gguf", "mvllm-parsers", "mvllm-tools", "mvllm-transformers-backend"):
        (tmp_path / f"{name.replace('-', '_')}-1-py3-none-any.whl").touch()
    assert not wheels.items(settings)[0].obstacle


@needs_suite
def test_reports_of_families_become_one(tmp_path: Path) -> None:
    from mvllm.testing.report import Outcome, Report, Status, Subject

    def report(family: str, *, complete: bool = True) -> Report:
        outcome = Outcome(f"test_{family}", [f"{family}-01"], Status.PASSED, 1.0)
        return Report(Subject("cuda"), "1", "1.1", [outcome], only=(family,), complete=complete)

    families = [item.name for item in conformance.items(settings_for(tmp_path))]
    whole = conformance.merged([report(family) for family in families], all_families=True)
    assert whole.conformant and len(whole.outcomes) == len(families) == 18
    part = conformance.merged([report("ATT"), report("OPS", complete=False)], all_families=False)
    assert not part.conformant and not part.complete and part.only == ("ATT", "OPS")


def test_quantized_checkpoints_have_the_sizes_of_their_formats() -> None:
    linear = 36 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12288)  # of Qwen3-8B
    rest = 2 * 151936 * 4096 * 2
    awq, float8 = (checkpoint_bytes(CONFIGS[name]) - rest for name in ("qwen3-8b-awq", "qwen3-8b-fp8"))
    assert awq / linear == pytest.approx(0.5 + 2.5 / 128, rel=1e-3)
    assert float8 / linear == pytest.approx(1 + 4 / 128**2, rel=1e-3)
    assert checkpoint_bytes(CONFIGS["gpt-oss-20b"]) == pytest.approx(13.76e9, rel=1e-2)
    shapes = {name: shape for name, _, shape in stored(CONFIGS["gpt-oss-20b"])}
    assert shapes["model.layers.0.mlp.experts.gate_up_proj_blocks"] == (32, 5760, 90, 16)
    one, many = (speed.step_bytes(CONFIGS["gpt-oss-20b"], batch) for batch in (1, 1000))
    assert 2.5e9 < one < 4e9 and many == pytest.approx(checkpoint_bytes(CONFIGS["gpt-oss-20b"]) - 201088 * 2880 * 2)


def test_the_help_names_presets_and_their_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.parse(["--help"])
    said = capsys.readouterr().out
    assert "install-and-numerics (300 s)" in said and "conformance-and-speed (480 s)" in said
    assert script.parse(["--preset", "conformance-and-speed"]).budget == 480
    assert script.parse(["--preset", "install-and-numerics", "--budget", "60"]).budget == 60


def test_settings_reach_children_as_they_are(tmp_path: Path) -> None:
    settings = Settings("cuda", tmp_path, tmp_path, 7.5, True, ("a",), ("B=1",), tmp_path)
    assert Settings.from_json(settings.to_json()) == settings
    values: dict[str, Any] = json.loads(settings.to_json())
    assert values["wheels"] == str(tmp_path)


def test_a_preset_has_its_own_parts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.parse(["bench", "--preset", "install-and-numerics"])
    assert "leave out 'bench'" in capsys.readouterr().err
