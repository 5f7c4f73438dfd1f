"""Lookup of models in folders, the demo, the hub's cache and the hub, and the errors for missing models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from mvllm.config import hub
from mvllm.config.engine_args import EngineArgs
from mvllm.errors import ModelError
from tests.unit.config.folders import LLAMA, write_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_cache(home: Path, name: str, *, revision: str = "main", commit: str = COMMIT, **changes) -> Path:
    """A hub cache in the layout of huggingface_hub: files are links into a store of blobs."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / revision).write_text(commit)
    (repository / "blobs").mkdir(exist_ok=True)
    blob = repository / "blobs" / f"blob-of-{commit}"
    blob.write_text(json.dumps({**LLAMA, **changes}))
    (snapshot / "config.json").symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.fixture
def download(monkeypatch):
    """Replaces the hub: records each request and returns `answer` or raises `error`. `files` are the repository's."""

    class Download:
        answer = "/snapshot"
        error: Exception | None = None
        files: tuple[str, ...] = ()
        calls: list[dict] = []  # noqa: RUF012

        def __call__(self, name, **kwargs):
            self.calls.append({"name": name, **kwargs})
            if self.error:
                raise self.error
            return self.answer

    fake = Download()
    fake.calls = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda name, **kwargs: list(fake.files))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return fake


# ------------------------------------------------------------------------------------------------------------- folders


def test_a_local_folder_causes_no_request_to_the_hub(tmp_path, download):
    assert hub.find_model(str(tmp_path), revision="v2") == tmp_path
    assert download.calls == []


def test_a_folder_named_like_a_hub_model_wins(tmp_path, download, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "org" / "name")
    assert hub.find_model("org/name") == Path("org/name")
    assert download.calls == []


def test_the_home_folder_may_be_abbreviated(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_folder(tmp_path / "models")
    assert hub.find_model("~/models") == tmp_path / "models"


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match=r"^The model '[^']*' is a file\. Pass the folder"):
        hub.find_model(str(tmp_path / "model.bin"))


@pytest.mark.parametrize(
    "name", ["./missing", "/no/such/folder", "~/no-such-folder", "a/b/c", "../up", "x\0y", "org/na me"]
)
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(name, download):
    with pytest.raises(ModelError, match=r"does not exist|cannot be looked up"):
        hub.find_model(name)
    assert download.calls == []


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_model_name_is_refused(name):
    with pytest.raises(ModelError, match="No model was named"):
        hub.find_model(name)


# ---------------------------------------------------------------------------------------------------------------- demo


def test_demo_is_the_packaged_model(tmp_path, monkeypatch):
    import mvllm.demo

    monkeypatch.setattr(mvllm.demo, "demo_model_path", lambda: tmp_path)
    assert hub.find_model("demo") == tmp_path


def test_a_local_model_folder_called_demo_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "demo")
    assert hub.find_model("demo") == Path("demo")


def test_a_missing_demo_says_how_to_get_it(monkeypatch):
    import mvllm.demo

    def missing():
        raise FileNotFoundError("it was not packed; train it")

    monkeypatch.setattr(mvllm.demo, "demo_model_path", missing)
    with pytest.raises(ModelError, match="'demo' was asked for, but it was not packed; train it"):
        hub.find_model("demo")


# ----------------------------------------------------------------------------------------------------------------- hub


def test_only_needed_files_are_downloaded(download):
    assert hub.find_model("org/name", revision="v1", token="secret") == Path("/snapshot")
    [call] = download.calls
    assert (call["name"], call["revision"], call["token"], call["local_files_only"]) == (
        "org/name",
        "v1",
        "secret",
        False,
    )
    wanted = call["allow_patterns"]
    assert {"*.json", "*.safetensors", "tokenizer*", "*.jinja", "*.txt"} <= set(wanted)
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in wanted if pattern != "tokenizer*")


def test_code_is_downloaded_only_with_trust_remote_code(download):
    hub.find_model("org/name", trust_remote_code=True)
    assert "*.py" in download.calls[0]["allow_patterns"]


def test_random_weights_need_no_download_of_weights(download):
    hub.find_model("org/name", with_weights=False)
    assert "*.safetensors" not in download.calls[0]["allow_patterns"]


def test_the_revision_applies_to_every_file(tmp_path, download):
    download.answer = str(write_folder(tmp_path))
    args = EngineArgs.from_kwargs(model="org/name", tokenizer="org/name", revision="v1", hf_token="t")
    assert args.create_engine_config().model.revision == "v1"
    assert {call["revision"] for call in download.calls} == {"v1"}
    assert {call["token"] for call in download.calls} == {"t"}


def test_a_tokenizer_from_elsewhere_has_its_own_revision(tmp_path, download):
    download.answer = str(write_folder(tmp_path))
    EngineArgs.from_kwargs(model="org/name", tokenizer="org/other", revision="v1").create_engine_config()
    EngineArgs.from_kwargs(
        model="org/name", tokenizer="org/other", revision="v1", tokenizer_revision="t2"
    ).create_engine_config()
    asked = [(call["name"], call["revision"]) for call in download.calls]
    assert asked == [("org/name", "v1"), ("org/other", None), ("org/name", "v1"), ("org/other", "t2")]
    assert "*.safetensors" not in download.calls[1]["allow_patterns"]


def http_error(cls: type[Exception]) -> Exception:
    """An error of the hub's client, created without a response of the HTTP library in use."""
    error = cls.__new__(cls)
    Exception.__init__(error, "no")
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (http_error(errors.RepositoryNotFoundError), r"no such repository[^$]*HF_TOKEN"),
        (http_error(errors.GatedRepoError), r"gated[^$]*hf_token"),
        (http_error(errors.RevisionNotFoundError), "does not have that revision"),
        (
            errors.LocalEntryNotFoundError("Got: ConnectError: cannot reach\nmore"),
            r"could not be fetched: the hub cannot be reached \(cannot reach\)\.[^$]*Check the network",
        ),
        (ConnectionError("refused\nby peer"), r"cannot be reached \(refused\)\."),
        (errors.HFValidationError("Repo id must use ..."), "no repository of that name[^$]*'organisation/name'"),
        (OSError(28, "No space left on device"), r"failed: No space left on device\.\nCheck HF_ENDPOINT"),
    ],
)
def test_every_error_says_what_was_tried_and_what_to_do(error, said, download, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    download.error = error
    with pytest.raises(ModelError, match=said) as caught:
        hub.find_model("org/name", revision="v1")
    assert f"Folder: {str(tmp_path / 'org' / 'name')!r} does not exist" in str(caught.value)
    assert "Error" not in str(caught.value) and len(str(caught.value).splitlines()) <= 5
    assert "'org/name' at revision 'v1'" in str(caught.value)
    assert caught.value.__cause__ is error


# --------------------------------------------------------------------------------------------------- offline, for real

NO_NETWORK = """
import socket, sys
def refuse(*args, **kwargs):
    raise SystemExit("the network was used")
socket.socket.connect = socket.socket.connect_ex = socket.socket.sendto = refuse
socket.create_connection = socket.getaddrinfo = socket.gethostbyname = refuse
from mvllm.config.engine_args import EngineArgs
from mvllm.errors import ModelError
try:
    config = EngineArgs.from_kwargs(model={model!r}, revision={revision!r}).create_engine_config()
    print(config.model.path, config.model.max_model_len)
except ModelError as e:
    print("ModelError:", e)
"""


def resolve_offline(model: str, revision: str | None = None, **environment: str) -> str:
    """The result of `find_model` in a new process with HF_HUB_OFFLINE=1 and without network access."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", NO_NETWORK.format(model=model, revision=revision)],
        env={**clean, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_cached_model_is_found_in_hf_home_without_any_network(tmp_path):
    snapshot = write_cache(tmp_path, "org/name", max_position_embeddings=77)
    assert resolve_offline("org/name", HF_HOME=str(tmp_path)) == f"{snapshot} 77"
    assert resolve_offline("org/name", HF_HUB_CACHE=str(tmp_path / "hub")) == f"{snapshot} 77"


def test_the_requested_revision_is_found_in_the_cache(tmp_path):
    write_cache(tmp_path, "org/name", max_position_embeddings=77)
    other = write_cache(tmp_path, "org/name", revision="v2", commit="f" * 40, max_position_embeddings=88)
    assert resolve_offline("org/name", "v2", HF_HOME=str(tmp_path)) == f"{other} 88"
    assert resolve_offline("org/name", "f" * 40, HF_HOME=str(tmp_path)) == f"{other} 88"


def test_the_error_for_a_model_that_is_not_cached_names_the_offline_variable(tmp_path):
    said = resolve_offline("org/name", HF_HOME=str(tmp_path))
    assert said.startswith("ModelError: The model 'org/name' was not found.")
    assert f"the cache '{tmp_path / 'hub'}' does not hold it" in said
    assert "HF_HUB_OFFLINE=1 forbids asking the hub" in said
    write_cache(tmp_path, "org/name")
    assert "at revision 'v9' was not found" in resolve_offline("org/name", "v9", HF_HOME=str(tmp_path))
