"""The wheelhouse: requirements files that no index can answer, consistent versions, and a workflow that runs."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import threading
import zipfile
from functools import partial
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest
import yaml

from tests.packaging.conftest import REPOSITORY, load_script

WORKFLOW = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "release.yml").read_text())
OURS = {"mvllm": (), "mvllm-cpu": ("mvllm>=0.9,<1", "torch>=2.6"), "mvllm-bench": ("mvllm>=0.9,<1",)}


@pytest.fixture
def wheelhouse(monkeypatch):
    module = load_script(REPOSITORY / "ci" / "wheelhouse.py", monkeypatch)
    monkeypatch.setattr(module, "parts", lambda: ["mvllm-bench>=0.9,<1"])
    return module


def make_wheel(folder, name, version="0.9.0", requires=(), origin="project"):
    """A wheel with one module that says where it comes from."""
    folder.mkdir(exist_ok=True, parents=True)
    package = name.replace("-", "_")
    path, info = folder / f"{package}-{version}-py3-none-any.whl", f"{package}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", f"Summary: {name} & more"]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{package}/__init__.py", f"ORIGIN = {origin!r}\n")
        archive.writestr(f"{info}/METADATA", "\n".join([*lines, *(f"Requires-Dist: {each}" for each in requires), ""]))
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def small(wheelhouse, tmp_path, monkeypatch):
    """A small wheelhouse; its only requirement of others is torch."""
    folder = tmp_path / "wheel house"
    for name, requires in OURS.items():
        make_wheel(folder, name, requires=requires)
    torch = hashlib.sha256(make_wheel(folder / "torch", "torch", "2.13.0+cpu").read_bytes()).hexdigest()
    (folder / wheelhouse.SOURCE).mkdir()
    monkeypatch.setattr(wheelhouse, "resolve", lambda *_: f"torch==2.13.0+cpu \\\n    --hash=sha256:{torch}\n")
    [target] = [each for each in wheelhouse.TARGETS if each.name == "cpu"]
    own = wheelhouse.own_wheels(folder)
    wheelhouse.write_requirements(target, own, wheelhouse.Torch("2.13.0+cpu", wheelhouse.TORCH), folder)
    page = wheelhouse.wheelhouse_page.page(own, "2.13.0+cpu", True, "https://example.org/mvllm")
    (folder / wheelhouse.PAGE).write_text(page)
    wheelhouse.write_manifest(folder)
    return folder


class Links(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag == "a":
            self.found.append(dict(attrs)["href"])


class TestConsistency:
    def test_a_wheelhouse_that_was_just_built_is_consistent(self, wheelhouse, small):
        wheelhouse.check(small)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda f: (f / "mvllm-0.9.0-py3-none-any.whl").unlink(), "in SHA256SUMS and not in the folder"),
            (lambda f: (f / "index.html").write_text(""), "index.html has another hash"),
            (lambda f: make_wheel(f, "mvllm-gguf", "0.9.1"), "different versions: 0.9.0, 0.9.1"),
            (
                lambda f: edit(f, r"(mvllm-cpu==0.9.0) \\\n.*\n", r"\1\n"),
                "'mvllm-cpu==0.9.0' has no version or no hash",
            ),
            (lambda f: edit(f, r"mvllm-cpu==0.9.0", "mvllm-cpu>=0.9.0"), "has no version or no hash"),
            (
                lambda f: edit(f, r"(mvllm-bench.*\n.*sha256:)\w+", r"\g<1>" + "0" * 64),
                "no wheel has a hash of mvllm-bench",
            ),
            (lambda f: edit(f, r"--find-links \.\n", ""), "no line `--find-links .`"),
        ],
        ids=["missing", "changed", "versions", "no hash", "no version", "other hash", "no folder"],
    )
    def test_a_fault_is_named(self, wheelhouse, small, change, says):
        change(small)
        with pytest.raises(wheelhouse.StepFailed, match=re.escape(says)):
            wheelhouse.check(small)

    @pytest.mark.parametrize("line", ["no hash", f"{'0' * 64}  ../secret", f"{'0' * 64}  /etc/passwd"])
    def test_its_list_names_files_in_the_folder_only(self, wheelhouse, small, line):
        (small / wheelhouse.MANIFEST).write_text(f"{line}\n")
        with pytest.raises(wheelhouse.StepFailed, match=re.escape(repr(line))):
            wheelhouse.check(small)

    def test_a_folder_that_is_none_is_an_error_that_says_so(self, wheelhouse, tmp_path, capsys):
        assert wheelhouse.main(["check", str(tmp_path)]) == 1
        assert "is no wheelhouse" in capsys.readouterr().err

    def test_the_tag_is_that_of_the_version(self, wheelhouse, small, capsys):
        assert wheelhouse.main(["check", str(small), "--tag", "v0.9.0"]) == 0
        for tag in ("v0.9.1", "0.9.0", "release"):
            assert wheelhouse.main(["check", str(small), "--tag", tag]) == 1
            assert f"is v0.9.0, not {tag}" in capsys.readouterr().err

    @pytest.mark.parametrize("name", ["mvllm", "mvllm-cpu", "mvllm_cpu", "Mvllm.cpu", "MVLLM"])
    def test_every_spelling_of_an_own_name_is_one(self, wheelhouse, name):
        assert wheelhouse.is_own(name)
        assert not wheelhouse.is_own("mvllmx") and not wheelhouse.is_own("vllm")

    def test_wheels_are_looked_for_without_torch_which_may_lie_in_the_folder(self, wheelhouse, small, monkeypatch):
        monkeypatch.setattr(wheelhouse, "RELEASE", wheelhouse.Environment(REPOSITORY, REPOSITORY / ".venv"))
        monkeypatch.setattr(wheelhouse, "PYTHONS", ("3.13",))
        monkeypatch.setattr(wheelhouse, "SYSTEMS", wheelhouse.SYSTEMS[:1])
        monkeypatch.setenv("UV_OFFLINE", "1")
        assert wheelhouse.check_wheels(small) == 0
        edit(small, r"mvllm-bench==0.9.0", "mvllm-bench==0.9.1")
        assert wheelhouse.check_wheels(small) == 1

    def test_the_time_of_files_is_that_of_the_last_commit_whoever_owns_them(self, wheelhouse, tmp_path, monkeypatch):
        monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # as in a container that mounts the files
        monkeypatch.setenv("HOME", str(tmp_path))
        assert wheelhouse.last_change() != "315532800"

    def test_an_address_of_torch_that_is_none_is_one_that_cannot_be_read(
        self, wheelhouse, monkeypatch, tmp_path, capsys
    ):
        monkeypatch.setattr(wheelhouse.Environment, "capture", lambda *_: ("", 1))
        monkeypatch.setattr(wheelhouse, "WORK", tmp_path)
        assert wheelhouse.find_torch("no-such-folder", "2.13.0").find_links is None
        assert "cannot be read" in capsys.readouterr().out

    def test_two_versions_stop_the_build(self, wheelhouse):
        wheelhouse.agree({"mvllm": "0.9.0", "mvllm-cpu": "0.9.0"})
        with pytest.raises(wheelhouse.StepFailed, match=re.escape("mvllm is 0.9.0, but mvllm-cpu 0.9.1")):
            wheelhouse.agree({"mvllm": "0.9.0", "mvllm-cpu": "0.9.1"})

    def test_all_distributions_of_the_repository_have_the_version_of_core(self, wheelhouse, monkeypatch):
        dev = load_script(REPOSITORY / "ci" / "dev.py", monkeypatch)
        versions = {wheelhouse.name_of(folder): wheelhouse.version_of(folder) for folder in dev.DISTRIBUTIONS}
        wheelhouse.agree(versions)
        platforms = {wheelhouse.name_of(folder) for folder in (REPOSITORY / "platforms").iterdir()}
        assert platforms < set(versions), "every platform is in the wheelhouse"

    def test_a_requirements_file_has_the_platform_core_and_all_parts(self, wheelhouse, small):
        text = (small / "cpu.txt").read_text()
        assert [line.split("==")[0] for line in wheelhouse.requirements(small / "cpu.txt")] == [*sorted(OURS), "torch"]
        assert "pip install --require-hashes -r WHEELHOUSE/cpu.txt" in text

    def test_every_platform_has_a_requirements_file(self, wheelhouse):
        folders = {f"platforms/{each.name}" for each in (REPOSITORY / "platforms").iterdir()}
        shared = {"platforms/torch-gpu", "platforms/triton-kernels"}
        assert {each for target in wheelhouse.TARGETS for each in target.projects} >= folders - shared


def edit(folder, pattern, text):
    file = folder / "cpu.txt"
    found, count = re.subn(pattern, text, file.read_text())
    assert count == 1, "the test has changed the file"
    file.write_text(found)


class TestRelease:
    def test_it_has_what_the_list_names_and_removes_nothing_of_others(self, wheelhouse, small, tmp_path, monkeypatch):
        out = tmp_path / "out"
        out.mkdir()
        (out / "mine.txt").touch()
        make_wheel(small, "mvllm-stray")  # not in the list
        monkeypatch.setenv("MVLLM_SOURCE_URL", "https://example.org/a/mvllm")
        wheelhouse.pack(small, out)
        assert {path.name for path in out.iterdir()} == {
            "mine.txt",
            "notes.md",
            "distributions",
            "mvllm-0.9.0-wheelhouse.tar.gz",
        }
        wheels = {path.name for path in (out / "distributions").iterdir()}
        assert wheels == {path.name for path in small.glob("mvllm*.whl")} - {"mvllm_stray-0.9.0-py3-none-any.whl"}
        assert "](https://example.org/a/mvllm/blob/v0.9.0/docs/changes)" in (out / "notes.md").read_text()
        with tarfile.open(out / "mvllm-0.9.0-wheelhouse.tar.gz") as archive:
            members = {each.name.partition("/")[2]: each for each in archive}
        assert set(members) == {wheelhouse.MANIFEST, *(name for _, name in wheelhouse.manifest(small))}
        assert {(each.uid, each.uname) for each in members.values()} == {(0, "")}

    def test_without_notes_of_the_version_there_is_none(self, wheelhouse, small, tmp_path, monkeypatch):
        (tmp_path / "CHANGELOG.md").write_text("## 10.9.0\n\nx\n\n## 0.9.0 (2026-01-01)\n\n## 0.9.01\n\ny\n")
        monkeypatch.setattr(wheelhouse, "ROOT", tmp_path)
        with pytest.raises(wheelhouse.StepFailed, match=re.escape("has no notes of 0.9.0")):
            wheelhouse.pack(small, tmp_path / "out")

    @pytest.mark.parametrize(
        ("version", "says"), [("0.9.0", "has a section of 0.9.0"), ("0.9.1", "would be empty"), ("v1.0.0", "is no ver")]
    )
    def test_notes_are_written_once_and_not_without_content(self, monkeypatch, version, says):
        site = load_script(REPOSITORY / "ci" / "docs_site.py", monkeypatch)
        monkeypatch.setattr(site, "fragments", list)
        monkeypatch.setattr(site, "setup", lambda: pytest.fail("the notes are written"))
        with pytest.raises(site.StepFailed, match=says):
            site.changelog(version)


class TestPage:
    def test_it_links_every_wheel_with_its_hash_and_says_how_to_install(self, wheelhouse, small):
        page = (small / "index.html").read_text()
        links = dict(link.split("#sha256=") for link in Links(page).found if "#sha256=" in link)
        wheels = {each.path.name: each.sha256 for each in wheelhouse.own_wheels(small)}
        assert {unquote(name): value for name, value in links.items()} == wheels
        for target in wheelhouse.TARGETS:
            assert f"-r WHEELHOUSE/{target.file}" in page
        assert "https://example.org/mvllm" in page and "mvllm &amp; more" in page

    def test_without_a_source_address_the_page_names_none(self, wheelhouse, small):
        page = wheelhouse.wheelhouse_page.page(wheelhouse.own_wheels(small), "2.13.0+cpu", True, "")
        assert "Source:" not in page

    def test_components_of_the_project_name_no_index_and_references_exist(self, wheelhouse, small):
        pins = {**wheelhouse.pins_of(small), "cuda": [("Typing_Extensions", "4.16.0")]}
        document = json.loads(wheelhouse.wheelhouse_page.components(wheelhouse.own_wheels(small), pins))
        by_name = {each["name"]: each for each in document["components"]}
        assert set(by_name) == {*OURS, "torch", "typing-extensions"}
        for name in OURS:
            assert by_name[name]["purl"].startswith("pkg:generic/") and by_name[name]["hashes"]
        assert by_name["torch"]["purl"] == "pkg:pypi/torch@2.13.0%2Bcpu"
        known = {each["bom-ref"] for each in document["components"]}
        assert all(known >= {each["ref"], *each["dependsOn"]} for each in document["dependencies"])
        [cpu] = [each for each in document["dependencies"] if each["ref"] == by_name["mvllm-cpu"]["bom-ref"]]
        assert cpu["dependsOn"] == sorted([by_name["mvllm"]["bom-ref"], by_name["torch"]["bom-ref"]])


@pytest.fixture
def hostile(tmp_path):
    """An index that offers the project's names, in the same version and in higher ones; its address."""
    root = tmp_path / "index"
    for name in OURS:
        wheels = [make_wheel(root / name, name, version, origin="index") for version in ("0.9.0", "0.9.1", "99.0")]
        hashes = [hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels]
        links = [f'<a href="{wheel.name}#sha256={value}">{wheel.name}</a>' for wheel, value in zip(wheels, hashes)]
        (root / name / "index.html").write_text(f"<!DOCTYPE html><html><body>{' '.join(links)}</body></html>")
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(root))
    handler.log_message = lambda *_: None
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


class TestHostileIndex:
    """An index has the names of the project, as the public one may."""

    @staticmethod
    def install(tool, address, target, *arguments, cwd):
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check"]
        pip += ["--index-url", address]
        uv = [
            sys.executable,
            "-m",
            "uv",
            "pip",
            "install",
            "-q",
            "--no-cache",
            "--no-config",
            "--default-index",
            address,
        ]
        uv += ["--python", sys.executable]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        return subprocess.run(
            [*(pip if tool == "pip" else uv), "--target", target, *arguments],
            cwd=cwd,
            env={**kept, "PIP_CONFIG_FILE": os.devnull},
            capture_output=True,
            text=True,
            timeout=120,
        )

    @pytest.mark.parametrize("tool", ["pip", "uv"])
    def test_every_distribution_comes_from_the_wheelhouse(self, small, hostile, tmp_path, tool):
        done = self.install(tool, hostile, tmp_path / "site", "--require-hashes", "-r", small / "cpu.txt", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        for name in OURS:
            assert "project" in (tmp_path / "site" / name.replace("-", "_") / "__init__.py").read_text()

    @pytest.mark.exhaustive
    def test_find_links_alone_takes_what_the_index_offers(self, small, hostile, tmp_path):
        done = self.install("pip", hostile, tmp_path / "site", "--find-links", small, "mvllm", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "index" in (tmp_path / "site" / "mvllm" / "__init__.py").read_text(), "hence the requirements files"

    @pytest.mark.parametrize("tool", [pytest.param("pip", marks=pytest.mark.exhaustive), "uv"])
    def test_a_distribution_that_the_file_does_not_list_is_refused(self, small, hostile, tmp_path, tool):
        edit(small, r"mvllm==0.9.0 \\\n.*\n", "")
        done = self.install(tool, hostile, tmp_path / "site", "--require-hashes", "-r", small / "cpu.txt", cwd=tmp_path)
        assert done.returncode != 0 and "mvllm" in done.stdout + done.stderr
        assert not (tmp_path / "site" / "mvllm").exists()


class TestWorkflow:
    def test_each_command_is_a_script_of_the_repository_or_a_tool_of_the_machine(self):
        tools = {"apt-get", "pip", "gh"}
        steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
        for step in steps:
            for command in step["run"].split("&&"):
                program, *arguments = shlex.split(command)
                if program == "python3":
                    assert (REPOSITORY / arguments[0]).is_file(), command
                    continue
                assert program in tools, command
            assert "${{" not in step["run"], "values reach a script as variables of its environment"

    def test_options_of_the_scripts_exist(self):
        for text in {step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step}:
            for command in map(shlex.split, text.split("&&")):
                if command[0] == "python3":
                    done = subprocess.run(
                        [sys.executable, *(command[1:3] if "dev.py" in command[1] else command[1:2]), "--help"],
                        cwd=REPOSITORY,
                        capture_output=True,
                        text=True,
                    )
                    assert done.returncode == 0
                    assert {word for word in command if word.startswith("--")} <= set(
                        re.findall(r"--[\w-]+", done.stdout)
                    )

    def test_every_python_is_tried_with_pip_and_uv_before_anything_is_published(self, wheelhouse):
        jobs = WORKFLOW["jobs"]
        assert set(jobs["stranger"]["strategy"]["matrix"]["python"]) == set(wheelhouse.PYTHONS)
        assert set(jobs["stranger"]["strategy"]["matrix"]["installer"]) == {"pip", "uv"}
        assert "stranger" in jobs["release"]["needs"] and jobs["publish"]["needs"] == "release"
        assert jobs["release"]["if"] == "github.event_name == 'push'", "a run by hand may be one of a tag"

    def test_actions_are_pinned_by_commit_and_leave_no_credentials_in_the_checkout(self):
        steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"] if "uses" in step]
        for step in steps:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", step["uses"])
            if step["uses"].startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False

    def test_an_index_is_used_only_where_a_variable_of_the_repository_names_one(self):
        publish = WORKFLOW["jobs"]["publish"]
        assert publish["if"] == "vars.MVLLM_PUBLISH_INDEX != ''"
        assert publish["steps"][-1]["with"]["repository-url"] == "${{ vars.MVLLM_PUBLISH_INDEX }}"
        others = [job for name, job in WORKFLOW["jobs"].items() if name != "publish"]
        assert "pypi" not in json.dumps(others)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_wheelhouse_of_the_repository(wheelhouse, tmp_path, monkeypatch):
    monkeypatch.undo()
    dev = load_script(REPOSITORY / "ci" / "dev.py", monkeypatch)
    import wheelhouse as real  # of ci/, whose folder load_script has put on the search path

    assert real.build(dev.DISTRIBUTIONS, "https://127.0.0.1:9", out=tmp_path, compiled=False) == 0
    real.check(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.txt")} == {target.name for target in real.TARGETS}
