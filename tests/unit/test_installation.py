"""The commands that messages give: they follow the way in which mvllm was installed, and name nobody else's package."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mvllm import installation
from mvllm.entrypoints.cli import doctor_checks
from mvllm.entrypoints.cli.main import main
from mvllm.errors import PlatformError
from mvllm.installation import (
    conflicting_distribution,
    describe_installation,
    install_command,
    is_own,
    uninstall_command,
)
from mvllm.platform.choose import choose_platform

REPOSITORY = Path(__file__).resolve().parents[2]
OURS = "[console_scripts]\nmvllm = mvllm.entrypoints.cli.main:main\n"
THEIRS = "[console_scripts]\nmvllm = mvllm.cli:main\n"
CORE_REQUIRES = (
    "numpy<3,>=1.26",
    "pillow<13,>=11; extra == 'multimodal'",
    "mvllm-cpu<1,>=0.9; extra == 'cpu'",
    "mvllm-lane<1,>=0.9; extra == 'lane'",
    "mvllm-many<1,>=0.9; extra == 'executors'",
    "mvllm-compat<1,>=0.9; extra == 'compat'",
    "mvllm-compat<1,>=0.9; extra == 'parts'",
    "mvllm-compat[tools]<1,>=0.9; extra == 'tools'",
)
GENERAL = "docs/how-to/install.md says what WHEELHOUSE is: the folder with the packages of mvllm"


class Machine:
    """An environment with nothing but the distributions that a test adds, and a clone of mvllm beside it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch
        self.site, self.clone, self.bin = folder / "site", folder / "clone", folder / "env" / "bin"
        for each in (self.site, self.bin):
            each.mkdir(parents=True)
        parts = {"": ("mvllm", ()), "plugins/compat": ("mvllm-compat", ()), "plugins/base": ("mvllm-base", ())}
        parts["platforms/lane"] = ("mvllm-lane", ("mvllm>=0.9,<1", "mvllm-base>=0.9,<1", "torch>=2.6"))
        for place, (name, required) in parts.items():
            (self.clone / place).mkdir(parents=True, exist_ok=True)
            text = f'[project]\nname = "{name}"\ndependencies = {json.dumps(required)}\n'
            (self.clone / place / "pyproject.toml").write_text(text)
        monkeypatch.setattr(sys, "path", [str(self.site), *sys.path])
        monkeypatch.setattr(sys, "executable", str(self.bin / "python"))
        monkeypatch.setattr(sys, "prefix", str(self.bin.parent))
        monkeypatch.setenv("PATH", str(self.bin))
        monkeypatch.setenv("VIRTUAL_ENV", str(self.bin.parent))
        monkeypatch.setitem(sys.modules, "pip", None)

    def program(self, name: str, folder: Path | None = None) -> None:
        """Adds a program, by default beside Python."""
        file = (folder or self.bin) / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
        file.chmod(0o755)

    def pip(self) -> None:
        """Adds the module pip, as `python -m venv` does."""
        self._monkeypatch.delitem(sys.modules, "pip")
        (self.site / "pip").mkdir()
        (self.site / "pip" / "__init__.py").touch()

    def distribution(
        self,
        name: str,
        *,
        version: str = "0.9.0",
        entry_points: str = "",
        requires: tuple[str, ...] = (),
        installer: str = "pip",
        came_from: dict[str, Any] | None = None,
        site: Path | None = None,
    ) -> None:
        info = (site or self.site) / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        required = "".join(f"Requires-Dist: {text}\n" for text in requires)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}")
        (info / "INSTALLER").write_text(installer)
        (info / "entry_points.txt").write_text(entry_points)
        if came_from is not None:
            (info / "direct_url.json").write_text(json.dumps(came_from))

    def core(self, came_from: dict[str, Any] | None = None, installer: str = "pip") -> None:
        self.distribution("mvllm", entry_points=OURS, requires=CORE_REQUIRES, came_from=came_from, installer=installer)

    def core_of_clone(self, *, editable: bool = False, installer: str = "pip") -> None:
        self.core({"url": self.clone.as_uri(), "dir_info": {"editable": editable} if editable else {}}, installer)

    def core_of_wheelhouse(self) -> Path:
        wheels = self.folder / "wheel house"
        wheels.mkdir()
        for file in ("mvllm-0.9.0-py3-none-any.whl", "cpu.txt", "lane.txt"):
            (wheels / file).touch()
        self.core({"url": (wheels / "mvllm-0.9.0-py3-none-any.whl").as_uri(), "archive_info": {}})
        return wheels


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Nothing is imported in a test with it but what is loaded: the folder of installed packages is hidden."""
    machine = Machine(tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    monkeypatch.setattr(installation, "_has_torch", lambda: True)
    return machine


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The environment of the tests, with another folder of packages before its own."""
    return Machine(tmp_path, monkeypatch)


class TestOwnPackages:
    def test_from_a_clone_a_part_is_the_folder_in_it(self, machine: Machine) -> None:
        machine.core_of_clone()
        assert install_command("mvllm-compat") == f"uv pip install {machine.clone}/plugins/compat"
        assert install_command("mvllm>=0.9") == f"uv pip install {machine.clone}"
        assert describe_installation() == (f"mvllm 0.9.0, from the folder {machine.clone}; the installer is `uv pip`")

    @pytest.mark.parametrize("name", ["a b", "it's", 'a "b"', "a;b", "50%20#x?"])
    def test_folders_of_any_name_are_one_word_of_a_command(self, machine: Machine, name: str) -> None:
        machine.clone = machine.clone.rename(machine.folder / name)
        machine.core_of_clone()
        assert shlex.split(install_command("mvllm-compat"))[-1] == f"{machine.clone}/plugins/compat"

    def test_an_editable_clone_stays_one(self, machine: Machine) -> None:
        machine.core_of_clone(editable=True)
        assert install_command("mvllm-compat", "mvllm") == (
            f"uv pip install -e {machine.clone}/plugins/compat -e {machine.clone}"
        )

    def test_what_a_package_requires_from_the_clone_comes_first(self, machine: Machine) -> None:
        machine.core_of_clone()
        lane = f"{machine.clone}/platforms/lane"
        assert install_command("mvllm-lane") == f"uv pip install {machine.clone}/plugins/base {lane}"
        machine.pip()
        machine.program("pip")
        assert install_command("mvllm-lane") == f"pip install {machine.clone}/plugins/base {lane}"
        machine.distribution("mvllm-base")
        assert install_command("mvllm-lane") == f"pip install {lane}"

    def test_a_platform_without_torch_brings_the_build_for_this_machine(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        machine.core_of_clone()
        monkeypatch.setattr(installation, "_has_torch", lambda: False)
        folders = f"{machine.clone}/plugins/base {machine.clone}/platforms/lane"
        assert install_command("mvllm-lane") == f"uv pip install --torch-backend=auto {folders}"
        assert "--torch-backend" not in install_command("mvllm-compat")
        machine.pip()
        index = "with the --index-url that PyTorch's installation page gives for your device"
        assert install_command("mvllm-lane").endswith(f"-m pip install {folders} (torch first, {index})")

    def test_from_a_wheelhouse_it_is_the_requirements_file_there(self, machine: Machine) -> None:
        wheels = machine.core_of_wheelhouse()
        machine.distribution("mvllm-cpu")
        assert install_command("mvllm-compat") == f"uv pip install --require-hashes --no-deps -r '{wheels}/cpu.txt'"
        assert install_command("mvllm-lane") == f"uv pip install --require-hashes --no-deps -r '{wheels}/lane.txt'"
        (wheels / "many.txt").touch()
        assert install_command("mvllm-many") == f"uv pip install --require-hashes --no-deps -r '{wheels}/many.txt'"
        assert install_command("mvllm-cpu", reinstall=True) == (
            f"uv pip uninstall mvllm-cpu && uv pip install --require-hashes --no-deps -r '{wheels}/cpu.txt'"
        )
        assert install_command("mvllm", upgrade=True) == (
            f"uv pip install --require-hashes --no-deps -r WHEELHOUSE/cpu.txt ({GENERAL} of a newer release)"
        )

    @pytest.mark.parametrize("source", ["index", "folder that is gone", "wheel without requirements", "web", "commit"])
    def test_from_elsewhere_it_is_the_general_form(self, machine: Machine, source: str) -> None:
        (machine.folder / "x").mkdir()
        came_from: dict[str, Any] = {"url": (machine.folder / "gone").as_uri(), "dir_info": {}}
        if source == "wheel without requirements":
            came_from = {"url": (machine.folder / "x").as_uri() + "/mvllm-0.9.0-py3-none-any.whl", "archive_info": {}}
        if source == "web":
            came_from = {"url": "https://example.com/mvllm-0.9.0-py3-none-any.whl", "archive_info": {}}
        if source == "commit":
            (machine.folder / "cpu.txt").touch()  # beside the repository, and none of a wheelhouse
            came_from = {"url": machine.clone.as_uri(), "vcs_info": {"vcs": "git", "commit_id": "0"}}
        machine.core(None if source == "index" else came_from)
        # The code under test is in the clone of the tests, which counts where the metadata names no folder.
        assert is_own("mvllm-gguf")
        installation_file = machine.folder / "lib" / "mvllm" / "installation.py"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(installation, "__file__", str(installation_file))
            assert install_command("mvllm-compat") == (
                f"uv pip install --require-hashes --no-deps -r WHEELHOUSE/PLATFORM.txt ({GENERAL})"
            )
            came = "a wheelhouse or an index" if source == "index" else "a source that is not on this machine"
            assert describe_installation() == f"mvllm 0.9.0, from {came}; the installer is `uv pip`"

    def test_a_folder_on_the_search_path_is_a_clone_without_metadata(self, machine: Machine) -> None:
        assert install_command("mvllm-compat") == f"uv pip install {REPOSITORY} {REPOSITORY}/plugins/compat"
        assert describe_installation().startswith(f"run from a folder, without an installation, from the folder {REPO}")
        assert conflicting_distribution() is None

    def test_what_a_listed_package_requires_is_own_too(self, machine: Machine) -> None:
        machine.core()
        machine.distribution("mvllm-lane", requires=("mvllm-lane-kernels<1,>=0.9", "numpy"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(installation, "__file__", str(machine.folder / "lib" / "mvllm" / "installation.py"))
            assert is_own("mvllm_lane_kernels") and is_own("mvllm.lane") and is_own("mvllm")
            assert not is_own("mvllm-acme") and not is_own("numpy")

    def test_after_an_update_of_the_clone_it_is_installed_again(self, machine: Machine) -> None:
        machine.core_of_clone()
        assert install_command("mvllm", upgrade=True) == (
            f"uv pip install {machine.clone} (after an update of {machine.clone})"
        )
        assert install_command("mvllm-compat", reinstall=True) == (
            f"uv pip install --reinstall --no-deps {machine.clone}/plugins/compat"
        )


REPO = re.escape(str(REPOSITORY)).replace("\\", "")


class TestOtherPackages:
    def test_an_extra_stands_for_the_libraries_that_it_lists(self, machine: Machine) -> None:
        machine.core_of_clone()
        machine.distribution("mvllm-compat", requires=("mcp<3,>=2.3; extra == 'tools'", "msgspec"))
        assert install_command("mvllm[multimodal]") == "uv pip install 'pillow<13,>=11'"
        assert install_command("mvllm-compat[tools]") == "uv pip install 'mcp<3,>=2.3'"
        assert install_command("mvllm[tools]") == "uv pip install 'mcp<3,>=2.3'", "an extra of an extra"

    def test_a_library_is_installed_by_name(self, machine: Machine) -> None:
        machine.core_of_clone()
        assert install_command("msgspec>=0.19", "numpy") == "uv pip install 'msgspec>=0.19' numpy"
        assert install_command("llguidance>=1.9", reinstall=True) == "uv pip install --reinstall 'llguidance>=1.9'"
        both = install_command("numpy", "mvllm-compat")
        assert both == f"uv pip install numpy {machine.clone}/plugins/compat"

    def test_a_vendors_package_is_upgraded_by_the_name_that_is_installed(self, machine: Machine) -> None:
        machine.core_of_clone()
        machine.distribution("mvllm-acme")
        assert install_command("mvllm-acme", upgrade=True) == "uv pip install -U mvllm-acme"

    def test_a_vendors_package_from_a_folder_comes_from_there(self, machine: Machine) -> None:
        machine.core_of_clone()
        folder = machine.folder / "my acme"
        folder.mkdir()
        machine.distribution("mvllm-acme", came_from={"url": folder.as_uri(), "dir_info": {"editable": True}})
        assert install_command("mvllm-acme", upgrade=True) == (
            f"uv pip install -e '{folder}' (after a change in {folder})"
        )

    def test_torch_comes_in_the_build_that_is_asked_for(self, machine: Machine) -> None:
        machine.core_of_clone()
        assert install_command("torch>=2.6", torch_backend="cpu") == "uv pip install --torch-backend=cpu 'torch>=2.6'"
        assert install_command("torch>=2.6") == "uv pip install --torch-backend=auto 'torch>=2.6'"
        assert install_command("torch-xla>=2.9") == "uv pip install 'torch-xla>=2.9'"
        machine.pip()
        machine.program("pip")
        assert install_command("torch", torch_backend="cpu") == (
            "pip install torch (with the --index-url that PyTorch's installation page gives for cpu)"
        )


class TestInstaller:
    def test_pip_is_the_one_of_this_environment(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        machine.core_of_clone()
        machine.pip()
        elsewhere = machine.folder / "elsewhere"
        machine.program("pip", elsewhere)
        monkeypatch.setenv("PATH", str(elsewhere))
        assert install_command("numpy") == f"{machine.bin}/python -m pip install numpy", "another Python's pip is found"
        machine.program("pip")
        monkeypatch.setenv("PATH", os.pathsep.join([str(machine.bin), str(elsewhere)]))
        assert install_command("numpy") == "pip install numpy"

    def test_outside_virtual_environments_the_pip_beside_python_may_be_another_ones(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        machine.pip()
        machine.program("pip")
        monkeypatch.setattr(sys, "base_prefix", sys.prefix)
        assert install_command("numpy") == f"{machine.bin}/python -m pip install numpy"

    def test_uv_stays_the_installer_of_what_it_has_installed(self, machine: Machine) -> None:
        machine.core_of_clone(installer="uv")
        machine.pip()
        machine.program("pip")
        assert install_command("numpy") == "pip install numpy", "uv is not there"
        machine.program("uv")
        assert install_command("numpy") == "uv pip install numpy"

    def test_uv_is_told_which_environment_is_meant(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        machine.core_of_clone()
        monkeypatch.delenv("VIRTUAL_ENV")
        assert install_command("numpy") == f"uv pip install numpy --python {machine.bin}/python"
        (machine.folder / ".venv").symlink_to(machine.bin.parent)
        monkeypatch.chdir(machine.folder)
        monkeypatch.setattr(sys, "prefix", str(machine.folder / ".venv"))
        assert install_command("numpy") == "uv pip install numpy", "uv finds .venv in the current folder"
        for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(variable, str(machine.folder / "another"))
                assert install_command("numpy").endswith(f" --python {machine.bin}/python"), "uv finds the other one"


class TestDamagedMetadata:
    """Whatever lies in the environment, an error's text can be made."""

    @pytest.mark.parametrize(
        "text", ["", "no JSON", "[]", "7", '{"url": 7}', '{"url": "file:///\\u0000", "dir_info": null}', "{}"]
    )
    def test_a_record_of_the_source_may_contain_anything(self, machine: Machine, text: str) -> None:
        machine.core({})
        [record] = machine.site.glob("mvllm-*/direct_url.json")
        record.write_text(text)
        assert install_command("mvllm-compat")
        record.write_bytes(b"\xff\xfe")
        assert install_command("mvllm-compat")

    def test_what_an_interrupted_uninstall_has_left_is_no_other_project(self, shared: Machine) -> None:
        (shared.site / "mvllm-0.8.0.dist-info").mkdir()
        assert conflicting_distribution() is None
        assert describe_installation().startswith("mvllm 0.9.0, from the folder ")

    def test_names_are_quoted(self) -> None:
        assert uninstall_command("mvllm-acme", "x; y").endswith("pip uninstall mvllm-acme 'x; y'")

    def test_a_plugin_without_metadata_is_named_after_its_folder(
        self, shared: Machine, capsys: pytest.CaptureFixture[str]
    ) -> None:
        info = shared.site / "mvllm_acme-1.0.dist-info"
        info.mkdir()
        (info / "entry_points.txt").write_text("[mvllm.platforms]\nacme = acme.plugin\n[mvllm.cli]\nacme = acme.cli\n")
        assert main(["platforms", "--platform", "acme"]) == 0
        shown = capsys.readouterr().out
        assert "plugin    mvllm-acme unknown version (entry point acme = acme.plugin)" in shown
        assert "pip install -U mvllm-acme, or " in shown
        with pytest.raises(SystemExit):
            main(["--help"])
        assert "a command of mvllm-acme" in capsys.readouterr().out


class TestNameConflict:
    """The package `mvllm` of another project, which has this name on the public package index."""

    def add_theirs(self, shared: Machine, site: Path | None = None) -> None:
        shared.distribution("mvllm", version="0.1.0", entry_points=THEIRS, site=site)

    def check(self, shared: Machine, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        words = f"The package mvllm 0.1.0 in {folder} belongs to another project"
        remedy = r"uv pip uninstall mvllm, until none is left, then uv pip install .+"
        with pytest.raises(PlatformError, match=words) as caught:
            choose_platform("cpu")
        assert re.search(rf"Run: {remedy}$", str(caught.value))
        assert main(["platforms"]) == 1
        assert words in capsys.readouterr().err
        [check] = doctor_checks._distribution()
        assert (check.id, check.status.value) == ("core.distribution", "broken")
        assert words in check.found and re.fullmatch(remedy, check.remedy or "")

    def test_its_metadata_with_this_code_is_an_error(self, shared: Machine, capsys: pytest.CaptureFixture[str]) -> None:
        self.add_theirs(shared)
        self.check(shared, capsys, shared.site)

    def test_both_in_one_folder_are_an_error(self, shared: Machine, capsys: pytest.CaptureFixture[str]) -> None:
        shared.core_of_clone()
        self.add_theirs(shared)
        self.check(shared, capsys, shared.site)

    def test_one_that_is_found_first_is_an_error(
        self, shared: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shared.core_of_clone()
        first = shared.folder / "first"
        self.add_theirs(shared, site=first)
        monkeypatch.setattr(sys, "path", [str(first), *sys.path])
        self.check(shared, capsys, first)

    def test_one_that_is_found_later_is_never_imported(self, shared: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        shared.core_of_clone()
        self.add_theirs(shared, site=shared.folder / "later")
        monkeypatch.setattr(sys, "path", [*sys.path, str(shared.folder / "later")])
        assert conflicting_distribution() is None

    def test_this_projects_own_metadata_is_known(self) -> None:
        """The entry point in pyproject.toml is the mark."""
        assert conflicting_distribution() is None
        assert '\nmvllm = "mvllm.entrypoints.cli.main:main"' in (REPOSITORY / "pyproject.toml").read_text()

    def test_platforms_say_it_where_its_code_has_replaced_this(self, tmp_path: Path) -> None:
        (tmp_path / "mvllm").mkdir()
        (tmp_path / "mvllm" / "__init__.py").write_text("__version__ = '0.1.0'\n")
        platforms = sorted(REPOSITORY.glob("platforms/*/src/*/plugin.py"))
        program = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as e:
        print(name, e)
"""
        found = subprocess.run(
            [sys.executable, "-c", program, *(f"{file.parent.name}.plugin" for file in platforms)],
            env={"PYTHONPATH": os.pathsep.join(map(str, [tmp_path, *(file.parents[1] for file in platforms)]))},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        assert len(found) == len(platforms) >= 7
        for line, file in zip(found, platforms, strict=True):
            assert line.startswith(f"{file.parent.name}.plugin {file.parents[2].name.join(['mvllm-', ''])} belongs to")
            assert "the package mvllm of this environment is another project's" in line


# ------------------------------------------------------------------------------------------------- what is written down

VENDORS = {"acme", "@name@", "frozen"}  # of examples, the template and tests: a vendor owns the name of its package
EXCEPT = ("docs/decisions/", "CHANGELOG.md", "tests/unit/test_installation.py")
TEXTS = (".py", ".md", ".toml", ".tmpl", ".yml", ".yaml", ".txt", ".Dockerfile", ".html", ".cfg", ".sh")


def tracked_texts() -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.splitlines() if name.endswith(TEXTS) and not name.startswith(EXCEPT)]
    return {name: (REPOSITORY / name).read_text("utf-8") for name in names if (REPOSITORY / name).is_file()}


def sent_to_an_index(text: str) -> list[str]:
    """The names of mvllm's own packages that a text gives to an index: `pip install` and a bare name."""
    found = []
    for match in re.finditer(r"pip3? install\b", text):
        line = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        rest = text[match.end() : match.end() + 300]
        if line.count("`") % 2:  # a code span, which may go on in the next line
            command = rest.partition("`")[0]
        else:
            command, _, more = rest.partition("\n")
            if not command.strip(" \"'f\\"):  # a text that goes on in the next line
                command = more.partition("\n")[0]
        before = ""
        for word in re.split(r"&&|[;|#]", command)[0].split():
            name = re.match(r"mvllm(?:-([a-z@<{][\w@<>{}-]*))?(?:\[|[=<>~]|$)", word.strip("\"'`,.()"))
            if name and name[1] not in VENDORS and before not in ("-e", "-r", "--reinstall-package"):
                found.append(" ".join(command.split()))
                break
            before = word
            if word.endswith(",") or (word.strip(",.)]:")[-1:] in ("'", '"') and word[:1] not in ("'", '"')):
                break  # the end of the text
    return found


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("pip install mvllm", True),
        ("Run: pip install -U mvllm mvllm-acme", True),
        ("uv pip install 'mvllm[compat]'", True),
        ('pip install "torch>=2.6" mvllm-cuda', True),
        ("`pip install\n'mvllm[cpu]'`", True),
        ('Run: pip install "\\n  \'"mvllm[ray]"', True),
        ("pip install openai\nmvllm serve demo", False),
        ("pip install mvllm-{name}", True),
        ("pip install --upgrade --force-reinstall mvllm", True),
        ("pip install -e mvllm-acme", False),
        ("pip install ./plugins/compat", False),
        ('uv pip install --reinstall-package mvllm-cpu ".[parts]" ./platforms/cpu', False),
        ("pip install --require-hashes -r WHEELHOUSE/cpu.txt", False),
        ("pip install openai, then mvllm serve", False),
        ("`pip install openai` and mvllm", False),
    ],
)
def test_the_search_knows_what_it_looks_for(text: str, is_one: bool) -> None:
    assert bool(sent_to_an_index(text)) is is_one


def test_nothing_sends_anybody_to_an_index_for_a_package_of_mvllm() -> None:
    found = {name: lines for name, text in tracked_texts().items() if (lines := sent_to_an_index(text))}
    assert not found, f"Name the package and link to docs/how-to/install.md#parts; in code use install_command: {found}"


def test_no_command_has_a_package_name_that_is_built() -> None:
    built = re.compile(r"""(?:install(?:_command\()?[^"'\n]*["']?[^"'\n]*|Run: [^"'\n]*)mvllm-\{""")
    sources = {name: text for name, text in tracked_texts().items() if re.match(r"(core|[^/]+/[^/]+/src|ci)/", name)}
    assert len(sources) > 500
    assert not [name for name, text in sources.items() if name.endswith(".py") and built.search(text)]
