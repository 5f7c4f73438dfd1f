"""The GGUF file that a model's name selects: in folders, in the hub's cache and on the hub."""

from __future__ import annotations

import fnmatch
import logging
import os
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from mvllm.config import hub
from mvllm.config.engine_args import EngineArgs
from mvllm.errors import ModelError
from mvllm_gguf import checkpoint_format
from tests.unit.config.folders import write_folder

DERIVED = Path("/derived")


@pytest.fixture(autouse=True)
def derived(monkeypatch):
    """Replaces the derivation of model folders; records each file, and whether the tokenizer is requested."""

    class Derived(list):
        folder = DERIVED

        def __call__(self, path, *, with_tokenizer=True):
            self.append((path, with_tokenizer))
            return self.folder

    stand_in = Derived()
    monkeypatch.setattr(checkpoint_format, "model_folder", stand_in)
    return stand_in


def fill(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


# ---------------------------------------------------------------------------------------------------- files and folders


def test_a_gguf_file_is_recognized_by_its_name_or_its_first_bytes(tmp_path, derived, monkeypatch):
    fill(tmp_path, "m.GGUF")
    (tmp_path / "blob").write_bytes(b"GGUF\3\0\0\0")
    monkeypatch.chdir(tmp_path)
    assert hub.find_model("m.GGUF") == DERIVED == hub.find_model(str(tmp_path / "blob"), with_tokenizer=False)
    assert derived == [(Path("m.GGUF"), True), (tmp_path / "blob", False)]


def test_a_pipe_is_refused_without_reading_it(tmp_path):
    os.mkfifo(tmp_path / "model")
    with pytest.raises(ModelError, match=r"is a file\. Pass the folder"):
        hub.find_model(str(tmp_path / "model"))


def test_a_gguf_file_has_precedence_over_a_config_json_in_its_folder(tmp_path, derived, caplog):
    fill(tmp_path, "m-Q8_0.gguf", "mmproj-f16.gguf", "config.json", "tokenizer.json", "README.md")
    with caplog.at_level(logging.INFO):
        assert hub.find_model(str(tmp_path)) == DERIVED
    assert derived == [(tmp_path / "m-Q8_0.gguf", True)]
    assert "config.json, tokenizer.json are not used" in caplog.text


@pytest.mark.parametrize(
    ("name", "load_format", "file"),
    [
        ("{}", "auto", None),
        ("{}", "safetensors", None),
        ("{}", "dummy", None),
        ("{}", "gguf", "m-Q4_K_M.gguf"),
        ("{}:q8_0", "auto", "m-Q8_0.gguf"),
    ],
)
def test_safetensors_have_precedence_unless_gguf_files_are_requested(name, load_format, file, tmp_path, derived):
    fill(tmp_path, "m-Q4_K_M.gguf", "m-Q8_0.gguf", "model.safetensors")
    found = hub.find_model(name.format(tmp_path), load_format=load_format)
    assert (found, [path for path, _ in derived]) == ((DERIVED, [tmp_path / file]) if file else (tmp_path, []))


def test_the_choice_is_logged(tmp_path, caplog):
    fill(tmp_path, "m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf")
    with caplog.at_level(logging.INFO):
        hub.find_model(str(tmp_path))
    assert f"Chose m-Q4_K_M.gguf of {tmp_path}. Further GGUF files: Q2_K, Q8_0." in caplog.text


def test_files_in_subfolders_are_found(tmp_path, derived):
    fill(tmp_path, "config.json", "BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf", "Q2_K/m.gguf")
    hub.find_model(f"{tmp_path}:bf16")
    hub.find_model(f"{tmp_path}:Q2_K")
    assert derived == [(tmp_path / "BF16" / "m-BF16-00001-of-00002.gguf", True), (tmp_path / "Q2_K" / "m.gguf", True)]


def test_a_folder_name_may_contain_a_colon(tmp_path, derived):
    fill(tmp_path, "a:Q8_0/m-Q2_K.gguf")
    hub.find_model(str(tmp_path / "a:Q8_0"))
    assert derived == [(tmp_path / "a:Q8_0" / "m-Q2_K.gguf", True)]


@pytest.mark.parametrize(
    ("name", "load_format", "said"),
    [
        ("both", "auto", r"2 models as GGUF files, none of them Q4_K_M: m-Q2_K\.gguf, m-Q8_0\.gguf.*both:Q2_K'"),
        ("both:Q6_K", "auto", "no GGUF file for 'Q6_K', but m-Q2_K"),
        ("both", "safetensors", "load_format is 'safetensors', but .*both is a model in GGUF form"),
        ("both:Q2_K", "safetensors", "load_format is 'safetensors', but .*both is a model in GGUF form"),
        ("both/m-Q2_K.gguf", "safetensors", "load_format is 'safetensors', but .*Q2_K.gguf is a model in GGUF form"),
        ("plain", "gguf", "holds no model as a GGUF file, and load_format='gguf' asks for one"),
        ("demo", "gguf", "demo.* holds no model as a GGUF file, and load_format='gguf' asks for one"),
        ("plain:Q2_K", "auto", "holds no model as a GGUF file, and ':Q2_K' asks for one"),
        ("both/m-Q2_K.gguf:Q2_K", "auto", "is a file, and ':Q2_K' would choose"),
        ("both/m-Q4_0.gguf", "auto", r"was not found\.[^$]*does not exist[^$]*Hub: not asked"),
        (r"C:\models\m-Q4_0.gguf", "auto", r"model 'C:\\\\models\\\\m-Q4_0.gguf' was not found[^$]*Hub: not asked"),
    ],
)
def test_missing_ambiguous_and_excluded_files_are_refused(name, load_format, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, "both/m-Q2_K.gguf", "both/m-Q8_0.gguf", "plain/config.json")
    with pytest.raises(ModelError, match=said):
        hub.find_model(name, load_format=load_format)


def test_tokenizer_files_in_the_folder_have_precedence_over_the_gguf_files_tokenizer(tmp_path, derived):
    fill(tmp_path, "m-Q8_0.gguf", "config.json")
    assert hub.find_tokenizer(str(tmp_path)) == DERIVED == hub.find_tokenizer(str(tmp_path / "m-Q8_0.gguf"))
    fill(tmp_path, "tokenizer.json")
    assert hub.find_tokenizer(str(tmp_path)) == tmp_path
    assert hub.find_tokenizer(f"{tmp_path}:Q8_0") == DERIVED


def test_an_engine_uses_the_models_tokenizer_unless_the_settings_name_another(tmp_path, derived):
    fill(tmp_path, "m.gguf")
    derived.folder = fill(write_folder(tmp_path / "derived"), "gguf_files.json")
    other = write_folder(tmp_path / "other")
    model = str(tmp_path / "m.gguf")
    config = EngineArgs.from_kwargs(model=model).create_engine_config().model
    assert (config.model, config.path, config.tokenizer) == (model, derived.folder, str(derived.folder))
    EngineArgs.from_kwargs(model=model, skip_tokenizer_init=True).create_engine_config()
    config = EngineArgs.from_kwargs(model=model, tokenizer=str(other)).create_engine_config().model
    assert config.tokenizer == str(other)
    assert derived == [(tmp_path / "m.gguf", True), (tmp_path / "m.gguf", False), (tmp_path / "m.gguf", False)]


def test_a_draft_model_may_have_another_file_format(tmp_path, derived):
    derived.folder = fill(write_folder(tmp_path / "derived"), "gguf_files.json")
    target = write_folder(fill(tmp_path / "target", "model.safetensors"))
    draft = fill(tmp_path / "draft", "m.gguf") / "m.gguf"
    speculative = {"model": str(draft), "num_speculative_tokens": 2}
    config = EngineArgs.from_kwargs(
        model=str(target), load_format="safetensors", skip_tokenizer_init=True, speculative_config=speculative
    ).create_engine_config()
    assert config.model.path == target and config.speculative.model.path == derived.folder


# -------------------------------------------------------------------------------------------------------------- the hub

QUANTIZED = ("README.md", "config.json", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m-F16.gguf", "m[1]-Q2_K.gguf")


@pytest.fixture
def repository(monkeypatch, tmp_path):
    """Replaces the hub by a repository with `files`; records downloaded files and requests."""

    class Repository:
        files = QUANTIZED
        error: Exception | None = None
        fetched: list[str]
        requests: list[tuple]

        def list_files(self, name, *, revision, token):
            self.requests.append(("list", name, revision, token))
            if self.error:
                raise self.error
            return list(self.files)

        def snapshot(self, name, *, revision, token, allow_patterns, ignore_patterns, local_files_only, **others):
            self.requests.append(("snapshot", name, revision, token))
            folder = tmp_path / "snapshot"
            folder.mkdir(exist_ok=True)
            if local_files_only:
                return str(folder)
            for file in self.files:
                if any(fnmatch.fnmatchcase(file, pattern) for pattern in allow_patterns):
                    self.fetched.append(file)
                    fill(folder, file)
            return str(folder)

    fake = Repository()
    fake.fetched, fake.requests = [], []
    monkeypatch.setattr(huggingface_hub, "list_repo_files", fake.list_files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)
    return fake


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("org/name-GGUF", "m-Q4_K_M.gguf"),
        ("org/name-GGUF:q8_0", "m-Q8_0.gguf"),
        ("org/other:Q8_0", "m-Q8_0.gguf"),
        ("org/other/m-Q8_0.gguf", "m-Q8_0.gguf"),
        ("org/other:Q2_K", "m[1]-Q2_K.gguf"),
    ],
)
def test_only_the_chosen_file_is_fetched(name, file, tmp_path, repository, derived):
    assert hub.find_model(name, revision="v1", token="secret", trust_remote_code=True) == DERIVED
    assert repository.fetched == [file] and derived == [(tmp_path / "snapshot" / file, True)]
    organisation_and_name = "/".join(name.split(":")[0].split("/")[:2])
    assert [request[1:] for request in repository.requests] == [(organisation_and_name, "v1", "secret")] * 2


def test_all_parts_of_a_split_model_are_fetched_together(tmp_path, repository, derived):
    parts = [f"BF16/m-BF16-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    repository.files = (*QUANTIZED, *parts)
    hub.find_model("org/name-GGUF:BF16")
    assert repository.fetched == parts and derived == [(tmp_path / "snapshot" / parts[0], True)]


def test_a_repository_with_safetensors_is_not_listed(tmp_path, repository, derived):
    repository.files = (*QUANTIZED, "model.safetensors")
    assert hub.find_model("org/name") == tmp_path / "snapshot"
    assert [request[0] for request in repository.requests] == ["snapshot"]
    assert not derived and repository.fetched == ["config.json", "model.safetensors"]


def test_a_repository_of_any_name_may_have_gguf_files_only(repository, derived):
    assert hub.find_model("org/name") == DERIVED
    assert repository.fetched == ["config.json", "m-Q4_K_M.gguf"]


def test_a_repository_with_tokenizer_files_needs_no_derived_tokenizer(tmp_path, repository, derived):
    repository.files = (*QUANTIZED, "tokenizer.json")
    assert hub.find_tokenizer("org/name-GGUF") == tmp_path / "snapshot" and not derived
    repository.files = QUANTIZED
    assert hub.find_tokenizer("org/name-GGUF") == DERIVED


@pytest.mark.parametrize(
    ("name", "load_format", "said"),
    [
        ("org/name-GGUF:Q6_K", "auto", r"the repository 'org/name-GGUF' holds no GGUF file for 'Q6_K', but .*m-Q8_0"),
        ("org/name-GGUF", "safetensors", "load_format is 'safetensors', but the repository 'org/name-GGUF' is a model"),
        ("org/name", "safetensors", "load_format is 'safetensors', but the repository 'org/name' is a model in GGUF"),
        ("org/name/m-Q6_K.gguf", "auto", r"no model in a GGUF file 'm-Q6_K.gguf'. Its GGUF files: m-Q4_K_M\.gguf, "),
        ("org/name/../m-Q6_K.gguf", "auto", "Hub: not asked"),
    ],
)
def test_a_missing_file_is_refused_without_downloading_a_gguf_file(name, load_format, said, repository):
    with pytest.raises(ModelError, match=said):
        hub.find_model(name, load_format=load_format)
    assert not any(file.endswith(".gguf") for file in repository.fetched)


def test_a_missing_repository_has_the_usual_error(repository):
    error = errors.RepositoryNotFoundError.__new__(errors.RepositoryNotFoundError)
    Exception.__init__(error, "no")
    repository.error = error
    with pytest.raises(ModelError, match=r"The model 'org/name-GGUF' was not found\.[^$]*no such repository"):
        hub.find_model("org/name-GGUF:Q8_0")


def test_without_the_network_the_cache_is_searched(tmp_path, repository, derived, caplog):
    repository.error = ConnectionError("refused")
    with pytest.raises(ModelError, match=r"'org/name-GGUF' could not be fetched[^$]*\(refused\)"):
        hub.find_model("org/name-GGUF")
    fill(tmp_path / "snapshot", "m-Q8_0.gguf")
    assert hub.find_model("org/name-GGUF") == DERIVED
    assert derived == [(tmp_path / "snapshot" / "m-Q8_0.gguf", True)]
    assert "The hub cannot be asked for org/name-GGUF (refused); its cache is used." in caplog.text


# ---------------------------------------------------------------------------------- offline, with the hub's own library


def test_offline_the_cached_file_is_found_and_others_are_not(tmp_path, derived, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--name-GGUF"
    fill(repository, "blobs/abc", "refs/main")
    (repository / "refs/main").write_text("c" * 40)
    snapshot = repository / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "m-Q8_0.gguf").symlink_to("../../blobs/abc")
    (snapshot / "m-Q4_K_M.gguf").symlink_to("../../blobs/interrupted")
    for name in ("org/name-GGUF", "org/name-GGUF:q8_0", "org/name-GGUF/m-Q8_0.gguf"):
        assert hub.find_model(name) == DERIVED
    assert derived == [(snapshot / "m-Q8_0.gguf", True)] * 3
    with pytest.raises(ModelError, match=r"the cached part of the repository 'org/name-GGUF' holds no .* but m-Q8_0"):
        hub.find_model("org/name-GGUF:Q4_K_M")
    with pytest.raises(ModelError, match=r"'org/absent' was not found[^$]*HF_HUB_OFFLINE=1 forbids asking the hub"):
        hub.find_model("org/absent:Q4_K_M")
