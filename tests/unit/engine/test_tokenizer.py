"""Loading and using a Tokenizer."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading

import pytest
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mvllm import ModelError
from mvllm.engine.frontend.bad_words import bad_word_token_ids
from mvllm.engine.frontend.thinking_tags import thinking_tokens_of
from mvllm.engine.tokenizer import tokenizer_json
from mvllm.engine.tokenizer.tokenizer import Tokenizer, check_supports_grammars, load_tokenizer
from tests.helpers.plugins import write_metadata
from tests.helpers.threads import run_in_threads
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


def test_settings_left_in_the_backend_have_no_effect():
    made = Tokenizer(make_hf_tokenizer)
    expected = made.encode_batch(TEXTS)
    made.hf(TEXTS, truncation=True, max_length=2)
    made.hf("x", split_special_tokens=True)
    assert made.encode_batch(TEXTS) == expected


def test_threads_that_truncate_do_not_truncate_the_texts_of_others():
    made, text = Tokenizer(make_hf_tokenizer), "Hello world, this is a text. " * 40
    single, truncated = made.encode(text), made.encode_truncated(text, max_tokens=7)
    stops = threading.Event()

    def truncate():  # as a user may, with the tokenizer of the engine
        while not stops.is_set():
            with contextlib.suppress(RuntimeError):  # "Already borrowed", in this thread
                made.hf(text, truncation=True, max_length=3)

    def encode():
        try:
            return all(
                made.encode_batch([text, text]) == [single, single]
                and made.encode_truncated(text, max_tokens=7) == truncated
                and made.decode(single)
                for _ in range(60)
            )
        finally:
            stops.set()

    assert run_in_threads(encode, truncate) == [True, None]


def test_a_class_with_its_own_call_method_is_used():
    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, text, **options):
            return {"input_ids": [[1, 2, 3] for _ in text]}

    hf = make_hf_tokenizer()
    hf.__class__ = Own
    assert Tokenizer(lambda: hf).encode("anything") == [1, 2, 3]


def test_lengths_are_checked_before_lists_are_made():
    made, told = make_tokenizer(), []
    ids = made.encode_batch(TEXTS, check_length=lambda i, length: told.append((i, length)))
    assert told == [(i, len(each)) for i, each in enumerate(ids)]


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_lower_bound_of_the_number_of_tokens_holds(kind):
    made = make_tokenizer(kind)
    for text in (
        " ",
        "a",
        "the cat sat ",
        "你好",
        "<|im_start|>",
        "\n",
        "\u1112\u1161\u11ab",
        "e\u0301",
        "ω\u0313\u0301\u0345",
    ):
        text *= 70_000 // len(text)
        assert 0 <= made.num_tokens_lower_bound(text) <= len(made.encode(text))
    is_known = kind in (
        "byte_level",
        "qwen2",
        "byte_fallback",
        "marks_first",
        "gemma",
    )  # others drop or join unknown characters
    assert (made.num_tokens_lower_bound("x" * 100_000) > 0) == is_known
    assert made.num_tokens_lower_bound("x" * 1000) == 0


AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


@pytest.mark.parametrize("before", [None, "1"])
def test_it_loads_no_device_backend_of_torch(tmp_path, before):
    save_tokenizer(tmp_path / "tokenizer")
    site = write_metadata(tmp_path / "site", "acme-torch", "[torch.backends]\nacme = acme_torch:load\n")
    (site / "acme_torch.py").write_text("def load(): raise SystemExit('a driver was opened')\n")
    program = (
        "import os, sys\n"
        "from mvllm.engine.tokenizer.tokenizer import load_tokenizer\n"
        "from tests.unit.engine.builders import make_config\n"
        f"assert load_tokenizer(make_config(tokenizer={str(tmp_path / 'tokenizer')!r}).model).hf\n"
        "assert 'torch' in sys.modules, 'nothing to see here'\n"
        f"assert os.environ.get({AUTOLOAD!r}) == {before!r}, 'the setting is the process own'\n"
    )
    env = {name: value for name, value in os.environ.items() if name != AUTOLOAD}
    env |= {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])} | (
        {AUTOLOAD: before} if before else {}
    )
    ran = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_the_tokenizer_class_is_that_of_transformers(tmp_path):
    save_tokenizer(tmp_path)
    for model_type in ("llama", "gpt2", "qwen2", "opt", "mistral", "no-such-type"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        for name in ("PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer"):
            path = tmp_path / "tokenizer_config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": name}))
            expected = AutoTokenizer.from_pretrained(str(tmp_path))
            assert type(load(tmp_path).hf) is type(expected)
            assert load(tmp_path).encode("Hello world") == expected.encode("Hello world")


def edit(path, **settings):
    """Merges settings into a JSON file; None removes a key."""
    merged = {**(json.loads(path.read_text()) if path.exists() else {}), **settings}
    path.write_text(json.dumps({name: value for name, value in merged.items() if value is not None}))


TEXTS = [
    "",
    "Hello world 🎉",
    "  two  spaces\n\tand <|end|> a special </s>token<s>",
    "Grüße, naïve 你好",
    "<unk> <extra>",
    "12345 we'Ll re\u0301sume\u0301",
]


def check_same_as_transformers(folder):
    """Compares before the property `hf` is read: after that it is transformers' tokenizer."""
    loaded, expected = load(folder), AutoTokenizer.from_pretrained(str(folder))
    for add in (True, False):
        ids = [loaded.encode(text, add_special_tokens=add) for text in TEXTS]
        assert ids == expected(TEXTS, add_special_tokens=add)["input_ids"]
    for skip in (True, False):
        decoded = [loaded.decode(each, skip_special_tokens=skip) for each in ids]
        assert decoded == [expected.backend_tokenizer.decode(each, skip_special_tokens=skip) for each in ids]
    assert loaded.length == max(len(expected), max(expected.get_vocab().values()) + 1)
    assert (loaded.eos_token_id, loaded.special_ids) == (
        expected.eos_token_id,
        {i for i, token in expected.added_tokens_decoder.items() if token.special},
    )
    return loaded


PLAIN = {
    "as saved": {},
    "by its new name": {"tokenizer_class": "TokenizersBackend"},
    "without other settings": {"added_tokens_decoder": None, "extra_special_tokens": None},
    "no end": {"eos_token": None},
    "a mapping": {"pad_token": {"content": "<unk>", "lstrip": True, "__type": "AddedToken"}},
}
NOT_PLAIN = {
    "a class with settings of its own": {"tokenizer_class": "GPT2Tokenizer"},
    "a token that is not in the file": {"sep_token": "<extra>"},
    "a token in a list": {"extra_special_tokens": ["<extra>"]},
    "a token of the model's own": {"image_token": "<extra>"},
    "another property": {"added_tokens_decoder": {"0": {"content": "<unk>", "lstrip": True, "special": True}}},
    "a new token by id": {"added_tokens_decoder": {"900": {"content": "<extra>", "special": True}}},
    "a setting that is not known": {"add_prefix_space": True},
    "an ordinary token": {"mask_token": "e"},
}


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "qwen3"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_without_transformers_token_ids_are_the_same(tmp_path, kind, model_type):
    save_tokenizer(tmp_path, kind)
    edit(tmp_path / "config.json", model_type=model_type)
    for settings in PLAIN.values() if kind == "byte_fallback" else [{}]:
        edit(tmp_path / "tokenizer_config.json", **settings)
        assert "hf" not in vars(check_same_as_transformers(tmp_path)), settings


@pytest.mark.parametrize("settings", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_transformers_is_used_if_its_class_changes_the_result(tmp_path, settings):
    save_tokenizer(tmp_path, "byte_fallback")
    edit(tmp_path / "config.json", model_type="llama")
    edit(tmp_path / "tokenizer_config.json", **settings)
    assert "hf" in vars(check_same_as_transformers(tmp_path))


GEMMA = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": False, "image_token": "<image>"}
NOT_GEMMA = {
    "another end": {"tokenizer_config.json": {"add_eos_token": True}},
    "a token that is not in the file": {"tokenizer_config.json": {"mask_token": "<extra>"}},
    "a setting that is not known": {"tokenizer_config.json": {"add_prefix_space": True}},
    "another normalizer": {"tokenizer.json": {"normalizer": {"type": "Lowercase"}}},
    "another decoder": {"tokenizer.json": {"decoder": {"type": "Fuse"}}},
    "another model": {"config.json": {"model_type": "llama"}},
}


def save_gemma(folder):
    save_tokenizer(folder, "gemma")
    edit(folder / "config.json", model_type="gemma3_text")
    edit(folder / "tokenizer_config.json", **GEMMA, extra_special_tokens={"image_token": "<image>"})


@pytest.mark.parametrize("name", ["GemmaTokenizer", "GemmaTokenizerFast"])
def test_a_file_equal_to_what_its_class_builds_is_read_without_transformers(tmp_path, name):
    save_gemma(tmp_path)
    edit(tmp_path / "tokenizer_config.json", tokenizer_class=name)
    assert "hf" not in vars(check_same_as_transformers(tmp_path))
    edit(tmp_path / "tokenizer_config.json", add_bos_token=None, add_eos_token=None)
    assert "hf" not in vars(check_same_as_transformers(tmp_path))


QWEN2 = {
    "tokenizer_class": "Qwen2Tokenizer",
    "unk_token": None,
    "add_prefix_space": False,
    "split_special_tokens": False,
    "errors": "replace",
}
NOT_QWEN2 = {
    "a space before the text": {"tokenizer_config.json": {"add_prefix_space": True}},
    "special tokens as texts": {"tokenizer_config.json": {"split_special_tokens": True}},
    "an end": {"tokenizer_config.json": {"add_eos_token": True}},
    "a token that is not in the file": {"tokenizer_config.json": {"pad_token": "<extra>"}},
    "another normalizer": {"tokenizer.json": {"normalizer": {"type": "Lowercase"}}},
    "another split": {
        "tokenizer.json": {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}}
    },
    "another model": {"config.json": {"model_type": "llama"}},
}


def save_qwen2(folder, model_type="qwen2", **settings):
    save_tokenizer(folder, "qwen2")
    edit(folder / "config.json", model_type=model_type)
    edit(folder / "tokenizer_config.json", **{**QWEN2, **settings})


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tokenizer_class": "Qwen2TokenizerFast"},
        {"add_bos_token": False, "bos_token": None, "pad_token": "<|im_start|>", "model_max_length": 5},
    ],
)
def test_the_tokenizer_of_qwen2_is_read_without_transformers(tmp_path, settings, model_type):
    save_qwen2(tmp_path, model_type, **settings)
    assert "hf" not in vars(check_same_as_transformers(tmp_path))


def test_it_is_read_if_settings_name_a_generic_class(tmp_path):
    save_qwen2(tmp_path, tokenizer_class="PreTrainedTokenizerFast")
    assert type(AutoTokenizer.from_pretrained(str(tmp_path))).__name__ == "Qwen2Tokenizer"
    assert "hf" not in vars(check_same_as_transformers(tmp_path))


@pytest.mark.parametrize("changes", NOT_QWEN2.values(), ids=NOT_QWEN2)
def test_transformers_is_used_if_the_file_differs_from_the_class_qwen2(tmp_path, changes):
    save_qwen2(tmp_path)
    for name, settings in changes.items():
        edit(tmp_path / name, **settings)
    assert "hf" in vars(check_same_as_transformers(tmp_path))


@pytest.mark.parametrize("changes", NOT_GEMMA.values(), ids=NOT_GEMMA)
def test_transformers_is_used_if_its_class_builds_a_different_tokenizer(tmp_path, changes):
    save_gemma(tmp_path)
    for name, settings in changes.items():
        edit(tmp_path / name, **settings)
    assert "hf" in vars(check_same_as_transformers(tmp_path))


@pytest.mark.parametrize("model_type", sorted(tokenizer_json._MODEL_TYPES))
def test_model_types_with_transformers_generic_class_are_read_from_the_file(tmp_path, model_type):
    save_tokenizer(tmp_path)
    edit(tmp_path / "config.json", model_type=model_type)
    assert "hf" not in vars(check_same_as_transformers(tmp_path))
    assert type(AutoTokenizer.from_pretrained(str(tmp_path))).__name__ == "TokenizersBackend"


@pytest.mark.parametrize("model_type", ["qwen2", "mistral", "no-such-type", None])
def test_transformers_is_used_for_model_types_with_their_own_class(tmp_path, model_type):
    save_tokenizer(tmp_path)
    edit(tmp_path / "config.json", model_type=model_type)
    assert "hf" in vars(check_same_as_transformers(tmp_path))


def test_older_files_are_read_if_the_settings_have_no_added_tokens(tmp_path):
    save_tokenizer(tmp_path, "byte_fallback")
    edit(tmp_path / "config.json", model_type="llama")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<unk>", "sep_token": "<extra>"}')
    assert "hf" in vars(check_same_as_transformers(tmp_path))
    edit(tmp_path / "tokenizer_config.json", added_tokens_decoder={})
    assert "hf" not in vars(check_same_as_transformers(tmp_path))


def test_length_limits_of_the_file_have_no_effect(tmp_path):
    save_tokenizer(tmp_path)
    edit(tmp_path / "config.json", model_type="llama")
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 40}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    for pad_token, plain in (
        ("<|end|>", True),
        ("!", False),
    ):  # transformers makes a special token of one that is not special in the file
        padding |= {"pad_type_id": 0, "pad_token": pad_token}
        edit(tmp_path / "tokenizer.json", truncation=truncation, padding=padding)
        assert ("hf" not in vars(check_same_as_transformers(tmp_path))) is plain


def test_changes_to_the_transformers_tokenizer_have_an_effect(tmp_path):
    save_tokenizer(tmp_path)
    edit(tmp_path / "config.json", model_type="llama")
    loaded = load(tmp_path)
    before = loaded.encode("<new>")
    assert loaded.hf.add_tokens(["<new>"], special_tokens=True) == 1
    [new] = loaded.encode("<new>")
    assert len(before) > 1
    assert loaded.decode([new], skip_special_tokens=False) == "<new>"


def test_a_tokenizer_read_from_its_file_imports_neither_transformers_nor_torch():
    program = (
        "import sys\n"
        "from mvllm import EngineArgs\n"
        "from mvllm.engine.tokenizer.tokenizer import load_tokenizer\n"
        "tokenizer = load_tokenizer(EngineArgs('demo').create_engine_config().model)\n"
        "assert tokenizer.decode(tokenizer.encode('Hello world')) == 'Hello world'\n"
        "sys.exit(f'loaded {heavy}' if (heavy := {'torch', 'transformers'} & set(sys.modules)) else 0)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_a_folder_without_a_tokenizer_is_named_with_the_expected_files(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json") as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_the_error_for_a_broken_tokenizer_lists_the_files_found(tmp_path):
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


def test_skip_tokenizer_init_gives_none():
    assert load_tokenizer(make_config().model) is None


def test_ids_outside_the_vocabulary_are_skipped():
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("Hello")
    assert tokenizer.decode([*ids, tokenizer.length + 7]) == "Hello"


def test_grammars_and_log_probabilities_do_not_need_transformers(tmp_path):
    save_tokenizer(tmp_path)
    edit(tmp_path / "config.json", model_type="llama")
    loaded = load(tmp_path)
    check_supports_grammars(loaded)
    alone = loaded.backend.to_str()
    pieces = [loaded.token_name(i) for i in range(loaded.length + 1)]
    assert "hf" not in vars(loaded)  # its import would delay all other requests
    assert pieces == [*loaded.hf.convert_ids_to_tokens(range(loaded.length)), None]
    assert alone == loaded.hf.backend_tokenizer.to_str()
    assert loaded.backend is loaded.hf.backend_tokenizer


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_special_tokens_stand_around_all_pieces(kind):
    hf = make_hf_tokenizer(kind)
    around = [("[A]", 1), ("[B]", 2)]
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing("[A] $A [B] [A]", special_tokens=around)
    made, pieces = Tokenizer(lambda: hf), ["the c", "at sat"]
    ids = made.encode_pieces(pieces)
    assert made.encode_pieces(pieces, add_special_tokens=True) == [1, *ids, 2, 1]
    assert ids[: len(made.encode(pieces[0])) - 3] == made.encode(pieces[0])[1:-2]
    assert made.decode(ids) == "the cat sat"


@pytest.mark.parametrize("kind", ["byte_fallback", "marks_first", "metaspace"])
def test_words_and_tags_are_found_within_a_text_and_at_its_beginning(kind):
    """A word after a bracket or a line break has no mark before it, the first word of a text has one."""
    made = make_tokenizer(kind)
    (word,) = made.encode_within(["mat"])
    assert word != made.encode("mat", add_special_tokens=False)
    text = made.encode("x=mat", add_special_tokens=False)
    assert any(text[at : at + len(word)] == word for at in range(len(text)))
    (spaced,) = made.encode_within([" mat"])
    assert bad_word_token_ids(["mat"], made) == ([word] if spaced[-len(word) :] == word else [word, spaced])

    tokens = thinking_tokens_of(["(think)", "(mat)"], made)
    assert made.decode([*made.encode("x"), *tokens.forced]).endswith("x(mat)")
    for markers, tag in ((tokens.starts, "(think)"), (tokens.ends, "(mat)")):
        for whole in (tag, "x" + tag, "x\n" + tag):
            ids = made.encode(whole, add_special_tokens=False)
            assert any(ids[at : at + len(marker)] == marker for marker in markers for at in range(len(ids)))
