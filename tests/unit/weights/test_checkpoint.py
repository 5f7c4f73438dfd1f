"""The files of a folder that contain the weights."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from mvllm.errors import ModelError
from mvllm.models.checkpoint import read_checkpoint
from tests.unit.weights.files import write_index

ONE = torch.ones(2)


def write(folder, file: str, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: ONE.clone() for name in names}, folder / file)


def test_one_file(tmp_path):
    write(tmp_path, "model.safetensors", "a", "b")
    assert sorted(read_checkpoint(tmp_path)) == ["a", "b"]


def test_copies_in_other_formats_are_ignored(tmp_path):
    write(tmp_path, "model.safetensors", "a")
    write(tmp_path, "consolidated.safetensors", "x")
    (tmp_path / "pytorch_model.bin").write_bytes(b"evil")
    assert list(read_checkpoint(tmp_path)) == ["a"]


def test_several_files_by_their_index(tmp_path):
    write(tmp_path, "one.safetensors", "a")
    write(tmp_path, "two.safetensors", "b", "c")
    write(tmp_path, "stray.safetensors", "z")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    assert {name: e.file.name for name, e in read_checkpoint(tmp_path).items()} == {
        "a": "one.safetensors",
        "b": "two.safetensors",
        "c": "two.safetensors",
    }


def test_several_files_without_an_index(tmp_path):
    write(tmp_path, "model-00001-of-00002.safetensors", "a")
    write(tmp_path, "model-00002-of-00002.safetensors", "b")
    write(tmp_path, "consolidated.00.safetensors", "z")
    assert sorted(read_checkpoint(tmp_path)) == ["a", "b"]


def test_a_missing_shard_is_named_with_an_index_and_without(tmp_path):
    write(tmp_path, "model-00001-of-00003.safetensors", "a")
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00003.safetensors, model-00003-of-00003.safetensors"):
        read_checkpoint(tmp_path)
    write_index(tmp_path, {"a": "model-00001-of-00003.safetensors", "b": "model-00002-of-00003.safetensors"})
    with pytest.raises(ModelError, match=r"'model-00002-of-00003.safetensors', which is missing"):
        read_checkpoint(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    write(tmp_path, "one.safetensors", "a", "b")
    write(tmp_path, "two.safetensors", "b")
    for use_index in (False, True):
        if use_index:
            write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
        with pytest.raises(ModelError, match=r"'b' is in two files, .*one\.safetensors and .*two\.safetensors"):
            read_checkpoint(tmp_path)


def test_an_index_that_contradicts_the_files_is_refused(tmp_path):
    write(tmp_path, "one.safetensors", "a")
    write(tmp_path, "two.safetensors", "b")
    write_index(tmp_path, {"a": "two.safetensors", "b": "one.safetensors"})
    with pytest.raises(ModelError, match=r"'a' is in 'two.safetensors', but it is in 'one.safetensors'"):
        read_checkpoint(tmp_path)
    write_index(tmp_path, {"a": "one.safetensors", "c": "two.safetensors"})
    with pytest.raises(ModelError, match=r"'c' is in 'two.safetensors', but it is not there"):
        read_checkpoint(tmp_path)


def test_more_tensors_than_a_model_can_need_are_refused(tmp_path):
    write(tmp_path, "model-00001-of-00002.safetensors", "a", "b")
    write(tmp_path, "model-00002-of-00002.safetensors", *(f"c{i}" for i in range(2100)))
    assert len(read_checkpoint(tmp_path, 2102)) == 2102
    with pytest.raises(ModelError, match=r"00002-of-00002\.safetensors: its header lists about 2100 tensors, .* 8 are"):
        read_checkpoint(tmp_path, 10)
    write_index(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"})
    assert len(read_checkpoint(tmp_path, 2)) == 2
    with pytest.raises(ModelError, match=r"index\.json lists 2 tensors, and at most 1 are allowed"):
        read_checkpoint(tmp_path, 1)
    (tmp_path / "model.safetensors.index.json").write_bytes(b" " * (2 << 20))
    with pytest.raises(ModelError, match=r"index\.json has 2097152 bytes"):
        read_checkpoint(tmp_path, 10)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "[" * 100_000]
)
def test_an_invalid_index_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "how", ["../outside.safetensors", "sub/../../outside.safetensors", "{absolute}", "..", "", "a\\b"]
)
def test_an_index_cannot_point_outside_the_folder(tmp_path, how):
    write(tmp_path, "outside.safetensors", "a")
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    write_index(folder, {"a": how.format(absolute=tmp_path / "outside.safetensors")})
    with pytest.raises(ModelError, match="outside the model folder"):
        read_checkpoint(folder)


def test_an_index_cannot_reach_outside_through_a_link(tmp_path):
    write(tmp_path, "outside.safetensors", "a")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "inside.safetensors").symlink_to(tmp_path / "outside.safetensors")
    (folder / "linked").symlink_to(tmp_path)
    for name in ("inside.safetensors", "linked/outside.safetensors"):
        write_index(folder, {"a": name})
        with pytest.raises(ModelError, match=r"links to .*outside the model folder"):
            read_checkpoint(folder)


def test_the_folder_and_its_files_may_be_links_inside_the_folder(tmp_path):
    folder = tmp_path / "model"
    write(folder / "sub", "real.safetensors", "a")
    (folder / "link.safetensors").symlink_to("sub/real.safetensors")
    write_index(folder, {"a": "link.safetensors"})
    (tmp_path / "alias").symlink_to(folder)
    assert list(read_checkpoint(tmp_path / "alias")) == ["a"]


def test_the_hubs_cache_links_into_its_own_store_and_nowhere_else(tmp_path):
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    write(repository / "blobs", "123", "a")
    (snapshot / "one.safetensors").symlink_to(os.path.relpath(repository / "blobs" / "123", snapshot))
    write_index(snapshot, {"a": "one.safetensors"})
    assert list(read_checkpoint(snapshot)) == ["a"]

    write(tmp_path / "hub" / "models--other", "456", "a")
    (snapshot / "one.safetensors").unlink()
    (snapshot / "one.safetensors").symlink_to(tmp_path / "hub" / "models--other" / "456")
    with pytest.raises(ModelError, match="outside the model folder"):
        read_checkpoint(snapshot)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_a_remedy(tmp_path, name):
    (tmp_path / name).write_bytes(b"evil")
    with pytest.raises(ModelError, match=rf"pickle files \({name}\).*save_pretrained"):
        read_checkpoint(tmp_path)


def test_an_index_that_names_pickled_files_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"evil")
    write_index(tmp_path, {"a": "pytorch_model.bin"})
    with pytest.raises(ModelError, match="pickle files"):
        read_checkpoint(tmp_path)


def test_a_folder_without_weights_says_what_it_expected_and_what_it_found(tmp_path):
    with pytest.raises(ModelError, match=r"expected model.safetensors or .*index.json.*found nothing.*dummy"):
        read_checkpoint(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match=r"found model.gguf, which it cannot read"):
        read_checkpoint(tmp_path)
    write(tmp_path, "adapter_model.safetensors", "a")
    with pytest.raises(ModelError, match=r"adapter \(adapter_model\), not a model"):
        read_checkpoint(tmp_path)
    shutil.rmtree(tmp_path)
    with pytest.raises(ModelError, match="holds no safetensors weights"):
        read_checkpoint(tmp_path)
