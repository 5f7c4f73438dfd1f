"""Loading a tokenizer, and refusing to."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mvllm import ModelError
from mvllm.engine.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.plugins import write_metadata
from tests.unit.engine.builders import make_config
from tests.unit.engine.tokenizers import KINDS, make_hf_tokenizer, make_tokenizer, save_tokenizer


def load(folder):
    return load_tokenizer(make_config(tokenizer=str(folder)).model)


@pytest.mark.parametrize("kind", list(KINDS))
def test_it_reads_a_folder(tmp_path, kind):
    save_tokenizer(tmp_path, kind)
    loaded, made = load(tmp_path), make_tokenizer(kind)
    assert loaded.encode("Hello world 🎉") == made.encode("Hello world 🎉")
    assert (loaded.length, loaded.eos_token_id) == (made.length, made.eos_token_id)


TEXTS = ["Hello world 🎉", "", "  two  spaces\n", "<|end|> and </s> spelled out", "你好" * 50]


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("special", [True, False])
def test_texts_get_the_ids_that_transformers_gives_them(kind, special):
    made = make_tokenizer(kind)
    assert made._encodes_by_backend
    expected = made.hf(TEXTS, add_special_tokens=special)["input_ids"]
    assert made.encode_batch(TEXTS, add_special_tokens=special) == expected
    assert [made.encode(text, add_special_tokens=special) for text in TEXTS] == expected


def test_what_others_have_set_in_it_does_not_count():
    made = Tokenizer(make_hf_tokenizer())
    expected = made.encode_batch(TEXTS)
    made.hf(TEXTS, truncation=True, max_length=2)
    made.hf("x", split_special_tokens=True)
    assert made.encode_batch(TEXTS) == expected


def test_a_class_with_ways_of_its_own_is_asked():
    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, text, **options):
            return {"input_ids": [[1, 2, 3] for _ in text]}

    hf = make_hf_tokenizer()
    hf.__class__ = Own
    assert Tokenizer(hf).encode("anything") == [1, 2, 3]


def test_lengths_are_told_before_there_are_lists():
    made, told = make_tokenizer(), []
    ids = made.encode_batch(TEXTS, check_length=lambda i, length: told.append((i, length)))
    assert told == [(i, len(each)) for i, each in enumerate(ids)]


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_long_text_has_no_fewer_tokens_than_can_be_said_without_tokenizing(kind):
    made = make_tokenizer(kind)
    for text in (" ", "a", "the cat sat ", "你好", "<|im_start|>", "\n"):
        text *= 70_000 // len(text)
        assert 0 <= made.fewest_tokens(text) <= len(made.encode(text))
    assert (made.fewest_tokens("x" * 100_000) > 0) == (kind == "byte_level")
    assert made.fewest_tokens("x" * 1000) == 0


AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


@pytest.mark.parametrize("before", [None, "1"])
def test_it_loads_no_device_library_that_announces_itself_to_torch(tmp_path, before):
    save_tokenizer(tmp_path / "tokenizer")
    site = write_metadata(tmp_path / "site", "acme-torch", "[torch.backends]\nacme = acme_torch:load\n")
    (site / "acme_torch.py").write_text("def load(): raise SystemExit('a driver was opened')\n")
    program = (
        "import os, sys\n"
        "from mvllm.engine.tokenizer import load_tokenizer\n"
        "from tests.unit.engine.builders import make_config\n"
        f"assert load_tokenizer(make_config(tokenizer={str(tmp_path / 'tokenizer')!r}).model).length\n"
        "assert 'torch' in sys.modules, 'nothing to see here'\n"
        f"assert os.environ.get({AUTOLOAD!r}) == {before!r}, 'the setting is the process own'\n"
    )
    env = {name: value for name, value in os.environ.items() if name != AUTOLOAD}
    env |= {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])} | (
        {AUTOLOAD: before} if before else {}
    )
    ran = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_it_is_the_one_that_transformers_chooses(tmp_path):
    save_tokenizer(tmp_path)
    for model_type in ("llama", "gpt2", "qwen2", "opt", "mistral", "no-such-type"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        for name in ("PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer"):
            path = tmp_path / "tokenizer_config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": name}))
            expected = AutoTokenizer.from_pretrained(str(tmp_path))
            assert type(load(tmp_path).hf) is type(expected)
            assert load(tmp_path).encode("Hello world") == expected.encode("Hello world")


def test_a_folder_without_one_is_named_with_the_files_looked_for(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json") as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_broken_one_is_named_with_the_files_found(tmp_path):
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot be loaded") as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "tokenizer.json" in str(caught.value)
    assert caught.value.__cause__ is not None


def test_its_code_does_not_run_unless_trusted(tmp_path):
    save_tokenizer(tmp_path)
    marker = tmp_path / "ran"
    (tmp_path / "custom.py").write_text(
        f"open({str(marker)!r}, 'w').close()\nfrom transformers import PreTrainedTokenizerFast\n"
        "class Custom(PreTrainedTokenizerFast):\n    pass\n"
    )
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"tokenizer_class": "Custom", "auto_map": {"AutoTokenizer": [null, "custom.Custom"]}}')
    try:
        load(tmp_path)
    except ModelError as e:
        assert "trust_remote_code" in str(e)
    assert not marker.exists()


def test_none_was_asked_for():
    assert load_tokenizer(make_config().model) is None


def test_ids_without_a_token_are_nothing():
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("Hello")
    assert tokenizer.decode([*ids, tokenizer.length + 7]) == "Hello"
