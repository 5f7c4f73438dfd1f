"""Model folders derived from GGUF files: written once and completely, and again if the file has changed."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from plugins.gguf.tests.encoded_files import write_gguf

from mvllm.errors import ModelError
from mvllm_gguf import folder_lock
from mvllm_gguf import model_folder as module
from mvllm_gguf.folder_lock import LOCK_NAME
from mvllm_gguf.header import read_gguf
from mvllm_gguf.model_folder import FILES_NAME, model_folder, update_states

TENSOR = {"output_norm.weight": (np.ones(4, np.float32), None)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Sets the cache folder and the system's temporary folder; returns the cache."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("MVLLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    return tmp_path / "cache" / "gguf"


@pytest.fixture(autouse=True)
def end_process():
    """Releases the locks that this process holds until its end."""

    def end():
        while folder_lock._held:
            os.close(folder_lock._held.popitem()[1])

    yield end
    end()


def change(file):
    """Changes one byte of the data, but not the header and the size."""
    content = bytearray(file.read_bytes())
    content[-1] = (content[-1] + 1) % 256
    time = file.stat().st_mtime_ns + 1
    file.write_bytes(content)
    os.utime(file, ns=(0, time))


@pytest.fixture
def derived(monkeypatch):
    """Replaces the conversions; records the converted models."""

    class Derived(list):
        contents = {"config.json": b"{}", "tokenizer.json": b"{}"}  # noqa: RUF012

        def __call__(self, model, with_tokenizer):
            self.append(model.files[0])
            return {name: content for name, content in self.contents.items() if with_tokenizer or "token" not in name}

    stand_in = Derived()
    monkeypatch.setattr(module, "_derive", stand_in)
    return stand_in


@pytest.fixture
def file(tmp_path):
    return write_gguf(tmp_path / "models" / "tiny model.Q4_0.gguf")


def test_a_folder_records_path_size_and_time_of_its_file(file, cache, derived):
    folder = model_folder(file)
    assert folder.parent == cache and folder.name.startswith("tiny_model.Q4_0-")
    assert sorted(path.name for path in folder.iterdir()) == [LOCK_NAME, "config.json", FILES_NAME, "tokenizer.json"]
    found = file.stat()
    assert json.loads((folder / FILES_NAME).read_text())["files"] == [
        {"path": str(file), "size": found.st_size, "mtime_ns": found.st_mtime_ns}
    ]


def test_an_existing_folder_is_found_without_reading_the_file(file, derived, monkeypatch):
    folder = model_folder(file)
    monkeypatch.setattr(module, "read_gguf", lambda path: pytest.fail("the header was read"))
    assert model_folder(file) == folder
    monkeypatch.chdir(file.parent)
    assert model_folder(Path(file.name)) == folder
    (file.parent / "sub").mkdir()
    (file.parent.parent / "link").symlink_to(file.parent / "sub")
    assert model_folder(file.parent.parent / "link" / ".." / file.name) == folder


def test_a_changed_file_gets_a_new_folder_and_the_old_one_is_removed(file, cache, derived, end_process):
    old = model_folder(file)
    change(file)
    end_process()
    new = model_folder(file)
    assert new != old and os.listdir(cache) == [new.name] and len(derived) == 2
    other = model_folder(write_gguf(file.with_name("other.gguf")))
    assert sorted(os.listdir(cache)) == sorted([new.name, other.name])
    file.unlink()
    end_process()
    model_folder(write_gguf(file.with_name("third.gguf")))
    assert not new.exists() and other.exists()


USE = """
import sys
from pathlib import Path
from mvllm_gguf import model_folder as module
from mvllm_gguf.model_folder import model_folder
module._derive = lambda model, with_tokenizer: {"config.json": b"{}"}
print(model_folder(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


def test_the_folder_of_a_changed_file_stays_as_long_as_a_process_uses_it(file, cache, derived, monkeypatch):
    monkeypatch.setattr(module, "_version", lambda: b"another")  # the process has the real one
    old = model_folder(file)
    command = [sys.executable, "-c", USE, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as user:
        used = Path(user.stdout.readline().strip())
        change(file)
        new = model_folder(file)
        assert len({old, used, new}) == 3 and old.exists() and new.exists()
        assert sorted(path.name for path in used.iterdir()) == [LOCK_NAME, "config.json", FILES_NAME]
        user.stdin.close()
    change(file)
    model_folder(file)
    assert not used.exists() and old.exists()  # the latter is used by this process


def test_a_touched_file_keeps_its_folder_which_gets_the_new_time(file, cache, derived):
    folder = model_folder(file)

    def stored():
        return json.loads((folder / FILES_NAME).read_text())["files"][0]["mtime_ns"]

    os.utime(file, ns=(0, 1))
    assert model_folder(file) == folder and stored() == 1 and len(derived) == 1
    os.utime(file, ns=(0, 2))
    update_states(folder)  # as the reader of the weights does
    assert stored() == 2 and os.listdir(cache) == [folder.name]
    change(file)
    update_states(folder)
    assert stored() == 2 and model_folder(file) != folder


def test_each_version_of_the_conversion_has_a_separate_folder(file, derived, monkeypatch, end_process):
    first = model_folder(file)
    monkeypatch.setattr(module, "_version", lambda: b"next")
    second = model_folder(file)
    assert second != first and first.exists()  # the other version may be in use
    os.utime(first, (0, 0))
    end_process()
    monkeypatch.setattr(module, "_version", lambda: b"after that")
    third = model_folder(file)
    assert not first.exists() and second.exists() and third.exists()


def test_the_version_changes_with_the_source_code(monkeypatch, tmp_path):
    sources = Path(module.__file__).parent
    for name in ("header.py", "model_folder.py"):
        (tmp_path / name).write_bytes((sources / name).read_bytes())
    monkeypatch.setattr(module, "__file__", str(tmp_path / "model_folder.py"))
    before = module._version.__wrapped__()
    assert module._version.__wrapped__() == before
    (tmp_path / "header.py").write_text("changed")
    assert module._version.__wrapped__() != before


def test_foreign_folders_are_never_removed(file, cache, derived):
    foreign = [cache / "notes", cache / "a-000000000000-000000000000", cache / ".mvllm-0123456789abcdef"]
    for folder in foreign:
        folder.mkdir(parents=True)
    os.utime(foreign[2], (0, 0))  # left by a process that was killed
    model_folder(file)
    assert [folder.exists() for folder in foreign] == [True, True, False]


@pytest.mark.parametrize("damage", ["missing", "short", "not JSON", "deep JSON"])
def test_a_damaged_folder_is_written_again(damage, file, derived):
    folder = model_folder(file)
    if damage == "missing":
        (folder / "tokenizer.json").unlink()
    elif damage == "short":
        (folder / "config.json").write_bytes(b"")
    else:
        (folder / FILES_NAME).write_bytes(b"{" if damage == "not JSON" else b"[" * 100_000)
    assert model_folder(file) == folder and len(derived) == 2
    assert (folder / "tokenizer.json").read_bytes() == b"{}" == (folder / "config.json").read_bytes()


def test_a_folder_without_tokenizer_is_separate(file, derived):
    with_tokenizer, without = model_folder(file), model_folder(file, with_tokenizer=False)
    assert with_tokenizer != without and not (without / "tokenizer.json").exists()
    assert (model_folder(file), model_folder(file, with_tokenizer=False)) == (with_tokenizer, without)
    assert len(derived) == 2


def test_every_part_of_a_split_model_has_the_same_folder(tmp_path, derived):
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for i, part in enumerate(parts):
        write_gguf(part, {f"t{i}": TENSOR["output_norm.weight"]}, {"split.no": i, "split.count": 2})
    folder = model_folder(parts[1])
    assert folder == model_folder(parts[0]) and folder.name.startswith("m-") and "00001" not in folder.name
    assert [each["path"] for each in json.loads((folder / FILES_NAME).read_text())["files"]] == [*map(str, parts)]
    change(parts[1])
    assert model_folder(parts[0]) != folder


def test_links_into_the_blobs_of_a_hub_cache_keep_their_names(tmp_path, derived):
    blob = write_gguf(tmp_path / "blobs" / "0123abcd")
    link = tmp_path / "snapshots" / "c0ffee" / "m.Q8_0.gguf"
    link.parent.mkdir(parents=True)
    link.symlink_to("../../blobs/0123abcd")
    folder = model_folder(link)
    [entry] = json.loads((folder / FILES_NAME).read_text())["files"]
    assert entry == {"path": str(link), "size": blob.stat().st_size, "mtime_ns": blob.stat().st_mtime_ns}


def test_the_default_cache_is_in_the_users_cache_folder(file, tmp_path, derived, monkeypatch):
    monkeypatch.delenv("MVLLM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert model_folder(file).parent == tmp_path / "xdg" / "mvllm" / "gguf"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert model_folder(file).parent == tmp_path / "home" / ".cache" / "mvllm" / "gguf"


def test_a_cache_that_cannot_be_written_is_replaced_by_a_private_folder(file, tmp_path, derived, monkeypatch, caplog):
    (tmp_path / "cache").write_text("a file")
    with caplog.at_level(logging.WARNING):
        folder = model_folder(file)
    private = tmp_path / "tmp" / f"mvllm-{os.getuid()}"
    assert folder.parent == private / "gguf" and private.stat().st_mode & 0o777 == 0o700
    assert f"The cache {tmp_path / 'cache' / 'gguf'} cannot be written" in caplog.text
    assert model_folder(file) == folder and len(derived) == 1


@pytest.mark.parametrize("what", ["open to others", "link"])
def test_a_temporary_folder_that_others_may_write_is_not_used(what, file, tmp_path, derived):
    (tmp_path / "cache").write_text("a file")
    private = tmp_path / "tmp" / f"mvllm-{os.getuid()}"
    if what == "link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        private.symlink_to(tmp_path / "theirs")
    else:
        private.mkdir()
        private.chmod(0o777)
    with pytest.raises(ModelError, match=r"cannot be written to a cache .*Set MVLLM_CACHE_DIR"):
        model_folder(file)


def test_a_folder_that_could_not_be_written_leaves_no_files(file, cache, derived, monkeypatch):
    def full(self, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ModelError, match="No space left on device"):
        model_folder(file)
    assert os.listdir(cache) == []


def test_a_file_that_changes_while_it_is_read_is_refused(file, monkeypatch):
    def change(model, with_tokenizer):
        os.utime(file, ns=(0, 1))
        return {"config.json": b"{}"}

    monkeypatch.setattr(module, "_derive", change)
    with pytest.raises(ModelError, match="was changed while it was read"):
        model_folder(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"nowhere\.gguf cannot be read: No such file"):
        model_folder(tmp_path / "nowhere.gguf")


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = write_gguf(tmp_path / "adapter.gguf", metadata={"general.type": "adapter"})
    with pytest.raises(ModelError, match=r"holds no language model: its general\.type is 'adapter'"):
        model_folder(path)
    with pytest.raises(ModelError, match="holds no language model"):
        module._derive(read_gguf(path), False)


def test_concurrent_threads_get_one_complete_folder(file, cache, monkeypatch):
    meeting, found = threading.Barrier(4), []

    def wait(model, with_tokenizer):
        meeting.wait(120)
        return {"config.json": b"{}", "tokenizer.json": b"x" * 100_000}

    monkeypatch.setattr(module, "_derive", wait)
    threads = [threading.Thread(target=lambda: found.append(model_folder(file))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 4 and len(set(found)) == 1 and os.listdir(cache) == [found[0].name]
    assert (found[0] / "tokenizer.json").stat().st_size == 100_000


RACE = """
import sys
from pathlib import Path
from mvllm_gguf import model_folder as module
module._derive = lambda model, with_tokenizer: {"config.json": b"{}", "tokenizer.json": b"x" * 300_000}
for i in range(40):
    folder = module.model_folder(Path(sys.argv[1]))
    if (folder / "tokenizer.json").stat().st_size != 300_000:
        sys.exit("incomplete")
    if i % 3 == int(sys.argv[2]):
        (folder / "config.json").unlink(missing_ok=True)  # as a cleaner does
print(folder)
"""


def test_concurrent_processes_that_write_repair_and_read_do_not_fail(file, cache):
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(file), str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    ended = [program.communicate(timeout=100) for program in programs]
    assert [program.returncode for program in programs] == [0, 0], ended
    assert ended[0][0] == ended[1][0] and os.listdir(cache) == [Path(ended[0][0].strip()).name]
