"""Tokenizers, chat templates and generation defaults from the metadata of GGUF files."""

from __future__ import annotations

import functools
import itertools
import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from mvllm import ModelError
from mvllm.engine.tokenizer.tokenizer import load_tokenizer
from mvllm.entrypoints.chat_template import read_chat_template, render_chat
from mvllm_gguf.generation_config import generation_config
from mvllm_gguf.header import GGUFModel, read_gguf
from mvllm_gguf.model_folder import FILES_NAME
from mvllm_gguf.pre_tokenizers import PRE_TOKENIZERS
from mvllm_gguf.tokenizer import tokenizer_files
from tests.helpers.published import FILES, MISSING, find_published
from tests.unit.engine.builders import make_config

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

TEXTS = [
    "",
    " ",
    "Hello",
    "  Hello  world  ",
    "a\tb\t\tc\n\n\nd\r\ne\r\n\r\nf",
    "3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3",
    "I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, 'D you like some tea? We'Ve a'lL",
    "🚀 (normal) 😶\u200d🌫\ufe0f (joined) ✅ 🦙🦙 👨\u200d👩\u200d👧\u200d👦 🇩🇪",
    "ied 4 ½ months ² ³ ¼ Ⅻ ٣٤٥ १२३",
    "កាន់តែពិសេសអាច😁 我想在apple工作1314151天～ ----- ======= нещо на Български ''''''```\"\"\"......!!!!??",
    "e\u0301 cafe\u0301 nai\u0308ve A\u030a ﬁ \u212b \u2126",
    "हिन्दी ไทย العربية עברית 한국어 ひらがな カタカナ",
    "def f(x):\n    return x**2  # comment\n\n\n\tif x:\n\t\tpass\n",
    "\u00a0\u2003\u3000 x\u200bz\u200d \ufeff▁under▁score_",
    "\x00\x01\x7f\u0085\ufffd\ue000\U00020000",
    "Ab ABc aBC HTTPServer JSONParser iPhone ÄÖü éÀ https://example.com/a?b=c&d=%20#x",
    " \n \n\n \t \t\t \t\n  \n   \n    \n     \n",
    "<table></table> <0x0A> <0xE2> aaaaaaaaaaaaaaaaa bababababa",
    "<|im_start|>user\nhi<|im_end|>\n<s></s><unk> x <think>y</think>",
]


def model(**metadata) -> GGUFModel:
    """The header of a file with this metadata: `chat_template` for `tokenizer.chat_template`, others in `.ggml`."""
    keys = {
        name: name if "." in name else f"tokenizer.{'' if name == 'chat_template' else 'ggml.'}{name}"
        for name in metadata
    }
    return GGUFModel((Path("model.gguf"),), {keys[name]: value for name, value in metadata.items()}, {})


def built(gguf: GGUFModel) -> Tokenizer:
    return Tokenizer.from_buffer(tokenizer_files(gguf)["tokenizer.json"])


def write(folder: Path, gguf: GGUFModel, model_type: str = "llama") -> Path:
    for name, content in tokenizer_files(gguf).items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def load(folder: Path):
    return load_tokenizer(make_config(tokenizer=str(folder)).model)


# What the published tokenizer.json of each family contains.
def split(*patterns: str, last: dict | None = None) -> dict:
    steps = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*steps, *([last] if last else []), byte_level]}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
ALL_DIGITS = {"type": "Digits", "individual_digits": True}
DIGITS = {"type": "Sequence", "pretokenizers": [ALL_DIGITS, BYTE_LEVEL]}
ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UP, LOW = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
FIRST = r"[^\r\n\p{L}\p{N}]?"
HANLESS_UP = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
HANLESS_LOW = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
HANLESS = rf"{FIRST}{HANLESS_UP}*{HANLESS_LOW}+{ENGLISH}?|{FIRST}{HANLESS_UP}+{HANLESS_LOW}*{ENGLISH}?"
O200K_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PUBLISHED: dict[str, tuple[dict | None, dict]] = {
    "gpt-2": (None, BYTE_LEVEL),
    "smollm": (None, DIGITS),
    "refact": (None, DIGITS),
    "starcoder": (None, DIGITS),
    "command-r": ({"type": "NFC"}, DIGITS),
    "llama-bpe": (None, split(ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST)),
    "qwen2": ({"type": "NFC"}, split(ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST)),
    "gpt-4o": (
        None,
        split(rf"{FIRST}{UP}*{LOW}+{ENGLISH}?|{FIRST}{UP}+{LOW}*{ENGLISH}?|\p{{N}}{{1,3}}" + O200K_REST),
    ),
    "kimi-k2": (None, split(r"[\p{Han}]+|" + HANLESS + r"|\p{N}{1,3}" + REST)),
    "tekken": (None, split(rf"{FIRST}{UP}*{LOW}+|{FIRST}{UP}+{LOW}*|\p{{N}}" + O200K_REST)),
    "falcon": (
        None,
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Punctuation", "behavior": "Contiguous"},
                BYTE_LEVEL,
                {"type": "Digits", "individual_digits": False},
                {"type": "Split", "pattern": {"Regex": "[0-9][0-9][0-9]"}, "behavior": "Isolated", "invert": False},
            ],
        },
    ),
    "deepseek-coder": (
        {"type": "Sequence", "normalizers": []},
        split("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", last=ALL_DIGITS),
    ),
    "deepseek-v3": (
        {"type": "Sequence", "normalizers": []},
        split(
            r"\p{N}{1,3}",
            "[一-龥\u3040-ゟ゠-ヿ]+",
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
            "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
        ),
    ),
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@functools.cache
def original(family: str) -> Tokenizer:
    """A small tokenizer of the family, trained here."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=family in ("llama-bpe", "tekken")))
    state = json.loads(tokenizer.to_str())
    state["normalizer"], state["pre_tokenizer"] = PUBLISHED[family]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def byte_level(family: str, **more) -> GGUFModel:
    """The metadata that a converter writes for `original(family)`."""
    state = json.loads(original(family).to_str())
    tokens = [token for token, _ in sorted(original(family).get_vocab().items(), key=lambda item: item[1])]
    types = {token["id"]: CONTROL if token["special"] else USER_DEFINED for token in state["added_tokens"]}
    return model(
        **{
            "model": "gpt2",
            "pre": family,
            "tokens": tokens,
            "token_type": [types.get(i, NORMAL) for i in range(len(tokens))],
            "merges": [" ".join(merge) for merge in state["model"]["merges"]],
            "eos_token_id": tokens.index("<|im_end|>"),
            "add_bos_token": False,
            **more,
        }
    )


@pytest.mark.parametrize("family", PUBLISHED)
def test_byte_level_vocabularies_encode_and_decode_like_the_original(family):
    made, expected = built(byte_level(family)), original(family)
    for text in TEXTS:
        ids = expected.encode(text).ids
        assert made.encode(text).ids == ids, text
        for skip in (True, False):
            assert made.decode(ids, skip_special_tokens=skip) == expected.decode(ids, skip_special_tokens=skip)


def test_the_test_texts_distinguish_the_pre_tokenizers():
    def words(family):
        normalizer, pre_tokenizer = original(family).normalizer, original(family).pre_tokenizer
        return [pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(t) if normalizer else t) for t in TEXTS]

    same = {frozenset(pair) for pair in itertools.combinations(("smollm", "refact", "starcoder"), 2)}
    for pair in itertools.combinations(PUBLISHED, 2):
        assert (words(pair[0]) == words(pair[1])) == (frozenset(pair) in same), pair


@pytest.mark.parametrize("family", PRE_TOKENIZERS)
def test_every_pre_tokenizer_preserves_the_text(family):
    tokenizer = built(byte_level("gpt-2", pre=family))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) in (
            text,
            normalizers.NFC().normalize_str(text),
        )


def test_without_a_named_pre_tokenizer_the_default_is_used_with_a_warning(caplog):
    with caplog.at_level("WARNING"):
        tokenizer = built(byte_level("gpt-2", pre=""))
    assert "tokenizer.ggml.pre" in caplog.text
    assert tokenizer.encode("a+b 12345").ids == built(byte_level("gpt-2", pre="default")).encode("a+b 12345").ids


# SentencePiece


def merge_by_scores(text: str, ids: dict[str, int], scores: list[float]) -> list[str]:
    """The tokens of SentencePiece, which merges the adjacent pair with the highest score (the leftmost if equal)."""
    symbols = list(text)
    while True:
        results = enumerate(map("".join, itertools.pairwise(symbols)))
        found = [(-scores[ids[token]], i) for i, token in results if token in ids]
        if not found:
            return symbols
        at = min(found)[1]
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]


def test_merges_follow_the_scores():
    made = random.Random(1)
    for _ in range(150):
        tokens = ["<unk>", "a", "b", "c"]
        for _ in range(made.randint(2, 14)):
            token = made.choice(tokens[1:]) + made.choice(tokens[1:])
            if token not in tokens and len(token) < 9:
                tokens.append(token)
        scores = [-float(i) for i in range(len(tokens))]
        made.shuffle(scores)
        gguf = model(
            model="llama", tokens=tokens, scores=scores, token_type=[UNKNOWN] + [NORMAL] * (len(tokens) - 1),
            add_space_prefix=False, add_bos_token=False,
        )  # fmt: skip
        tokenizer, ids = built(gguf), {token: i for i, token in enumerate(tokens)}
        for _ in range(20):
            text = "".join(made.choice("aabc") for _ in range(made.randint(1, 24)))
            assert tokenizer.encode(text).tokens == merge_by_scores(text, ids, scores), (text, tokens, scores)


@functools.cache
def sentencepiece() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types of a small SentencePiece model with user-defined white space, as of Gemma."""
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False)
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in TEXTS[:-7]], trainer)
    learned = sorted(tokenizer.get_vocab(), key=lambda token: (len(token) == 1, tokenizer.token_to_id(token)))
    special = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL}
    own = {"\n\n": USER_DEFINED, "  ": USER_DEFINED, "    ": USER_DEFINED, "<table>": USER_DEFINED}
    kinds = {**special, **{f"<0x{i:02X}>": BYTE for i in range(256)}, **own}
    learned = [token for token in learned if token not in kinds]
    scores = [-1000.0 if kind in (CONTROL, USER_DEFINED) else 0.0 for kind in kinds.values()]
    return (
        [*kinds, *learned],
        [*scores, *(-float(i) for i in range(len(learned)))],
        [*kinds.values(), *[NORMAL] * len(learned)],
    )


def sentencepiece_model(**more) -> GGUFModel:
    tokens, scores, types = sentencepiece()
    return model(**{"model": "llama", "tokens": tokens, "scores": scores, "token_type": types, **more})


def reference(text: str, prefix: bool) -> list[str]:
    """The tokens of a text according to llama.cpp."""
    tokens, scores, types = sentencepiece()
    ids = {token: i for i, token in enumerate(tokens)}
    found: list[str] = []
    pieces: list[tuple[str, bool]] = [(text, False)]
    added = [token for token, kind in zip(tokens, types, strict=True) if kind in (UNKNOWN, CONTROL, USER_DEFINED)]
    for token in sorted(added, key=len, reverse=True):
        cut: list[tuple[str, bool]] = []
        for piece, is_token in pieces:
            rest = [piece] if is_token else piece.split(token)
            for i, part in enumerate(rest):
                cut += [(token, True)] * (i > 0) + [(part, is_token)] * bool(part)
        pieces = cut
    mergeable = {token: ids[token] for token, kind in zip(tokens, types, strict=True) if kind in (NORMAL, USER_DEFINED)}
    for piece, is_token in pieces:
        for symbol in (
            [piece] if is_token else merge_by_scores("▁" * prefix + piece.replace(" ", "▁"), mergeable, scores)
        ):
            found += [symbol] if symbol in ids else [f"<0x{byte:02X}>" for byte in symbol.encode()]
    return found


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_vocabularies_encode_and_decode_like_llama_cpp(prefix):
    tokenizer = built(sentencepiece_model(add_space_prefix=prefix))
    for text in TEXTS:
        assert tokenizer.encode(text).tokens == ["<s>", *reference(text, prefix)], text
        if not any(token in text for token in ("<", "\n\n", "  ")):  # a prefix follows each of these
            assert tokenizer.decode(tokenizer.encode(text).ids) == text.replace("▁", " ")


def test_vocabularies_of_gemma_4_have_their_merges_in_the_file():
    tokens, scores, types = sentencepiece()
    known = {token for token, kind in zip(tokens, types, strict=True) if kind in (NORMAL, USER_DEFINED)}
    merges = [
        f"{token[:end]} {token[end:]}"
        for _, token in sorted(zip(scores, tokens, strict=True), key=lambda pair: -pair[0])
        for end in range(len(token) - 1, 0, -1)
        if token in known and token[:end] in known and token[end:] in known
    ]
    more = {"model": "gemma4", "tokens": tokens, "token_type": types, "merges": merges, "unknown_token_id": 0}
    tokenizer = built(model(**more, scores=[-1000.0] * len(tokens), add_space_prefix=False, bos_token_id=1))
    for text in TEXTS:
        assert tokenizer.encode(text).tokens == ["<s>", *reference(text, False)], text
        if "<" not in text:
            assert tokenizer.decode(tokenizer.encode(text).ids) == text.replace("▁", " ")


def test_literal_control_and_byte_tokens_do_not_result_from_merges():
    tokens, scores, types = sentencepiece()
    more = ["<0", "x0A>", "<0x0"]  # would merge to <0x0A>
    gguf = model(
        model="llama", tokens=[*tokens, *more], scores=[*scores, *[5.0] * 3], token_type=[*types, *[NORMAL] * 3],
    )  # fmt: skip
    assert "<0x0A>" not in built(gguf).encode("<0x0A>").tokens


# Special tokens


@pytest.mark.parametrize(
    ("more", "before", "after"),
    [
        ({}, ["<s>"], []),
        ({"add_bos_token": False}, [], []),
        ({"add_eos_token": True}, ["<s>"], ["</s>"]),
        ({"add_bos_token": False, "add_eos_token": True, "eos_token_id": 4}, [], ["<|im_end|>"]),
    ],
)
def test_bos_and_eos_are_added_according_to_the_file(more, before, after):
    tokenizer = built(sentencepiece_model(**more))
    inner = tokenizer.encode("the cat", add_special_tokens=False).tokens
    assert tokenizer.encode("the cat").tokens == [*before, *inner, *after]


@pytest.mark.parametrize(("family", "expected"), [("llama-bpe", True), ("tekken", True), ("gpt-2", False)])
def test_the_pre_tokenizer_determines_whether_bos_is_added_if_the_file_does_not(family, expected):
    gguf = byte_level("gpt-2", pre=family, bos_token_id=0)
    gguf = GGUFModel(gguf.files, {k: v for k, v in gguf.metadata.items() if not k.endswith("add_bos_token")}, {})
    assert (built(gguf).encode("x").tokens[0] == SPECIAL[0]) == expected


def test_control_tokens_are_special_and_user_defined_ones_are_not():
    gguf = byte_level("gpt-2", padding_token_id=50)
    added = built(gguf).get_added_tokens_decoder().values()
    assert {token.content for token in added if token.special} == set(SPECIAL)
    assert {token.content for token in added if not token.special} == {"<think>", "</think>"}
    assert not any(token.normalized or token.lstrip or token.rstrip for token in added)
    settings = json.loads(tokenizer_files(gguf)["tokenizer_config.json"])
    assert settings["eos_token"] == "<|im_end|>"
    assert "pad_token" not in settings  # an ordinary character: decoding would drop it everywhere


def test_tokens_that_end_a_turn_are_special_even_if_the_file_has_no_types():
    gguf = byte_level("gpt-2")
    gguf = GGUFModel(gguf.files, {k: v for k, v in gguf.metadata.items() if not k.endswith("token_type")}, {})
    assert built(gguf).decode(built(gguf).encode("x<|im_end|>").ids) == "x"


def test_special_tokens_of_phi3_strip_the_white_space_after_them():
    tokenizer = built(sentencepiece_model(**{"general.architecture": "phi3"}))
    ids = tokenizer.encode("<|im_start|> \n<unk> ", add_special_tokens=False).ids
    assert [tokenizer.id_to_token(i) for i in ids] == ["<|im_start|>", "<unk>", *reference(" ", prefix=True)]


# Use by the engine


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [("byte level", "llama"), ("byte level", "qwen2"), ("sentencepiece", "llama"), ("sentencepiece", "gemma3_text")],
)
def test_the_engine_reads_it_without_transformers_and_transformers_reads_the_same(tmp_path, kind, model_type):
    more = {"general.architecture": "x", "x.context_length": 77, "bos_token_id": 1, "chat_template": "{{ 1 }}"}
    more |= {"add_bos_token": True}
    gguf = byte_level("qwen2", **more) if kind == "byte level" else sentencepiece_model(**more)
    loaded = load(write(tmp_path, gguf, model_type))
    ids = [loaded.encode(text) for text in TEXTS]
    decoded = [loaded.decode(each) for each in ids]
    special, eos = loaded.special_ids, loaded.eos_token_id
    assert "hf" not in vars(loaded)
    hf = loaded.hf
    assert hf(TEXTS)["input_ids"] == ids
    assert [hf.backend_tokenizer.decode(each) for each in ids] == decoded
    assert hf.eos_token_id == eos
    assert special == {i for i, token in hf.added_tokens_decoder.items() if token.special}
    assert (hf.model_max_length, hf.chat_template) == (77, "{{ 1 }}")


@pytest.mark.parametrize(
    ("kind", "model_type"), [("llama-bpe", "mistral"), ("gpt-2", "qwen2"), ("sentencepiece", "mistral")]
)
def test_the_tokenizer_of_a_derived_folder_does_not_depend_on_the_model_type(tmp_path, kind, model_type, caplog):
    """transformers has other tokenizer classes for these model types, with other pre-tokenizers."""
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | tojson }}\n{% endfor %}{{ x }}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    more = {"bos_token_id": 1, "chat_template": template, "add_bos_token": True}
    gguf = sentencepiece_model(**more) if kind == "sentencepiece" else byte_level(kind, **more)
    (tmp_path / FILES_NAME).write_text("{}")
    loaded = load(write(tmp_path, gguf, model_type))
    ids = [loaded.encode(text) for text in TEXTS]
    assert ids == [built(gguf).encode(text).ids for text in TEXTS]
    chat = [{"role": "user", "content": "<é>", "name": None}, {"role": "assistant", "content": "A"}]
    given = {"chat_template_kwargs": {"x": 7}}
    rendered = [render_chat(loaded, chat, **given), render_chat(loaded, chat, chat_template="{{ eos_token }}!")]
    assert "hf" not in vars(loaded)
    assert rendered[0].endswith('[user] "<é>"\n[assistant] "A"\n7[assistant]')
    assert loaded.hf(TEXTS)["input_ids"] == ids and loaded.template_renderer is loaded.hf
    assert rendered == [render_chat(loaded, chat, **given), render_chat(loaded, chat, chat_template="{{ eos_token }}!")]
    assert "regex" not in caplog.text


def test_chat_templates_have_a_size_limit(tmp_path):
    longest = "x" * (4 << 20)
    write(tmp_path, byte_level("gpt-2", chat_template=longest))
    assert read_chat_template(tmp_path) == longest
    (tmp_path / "chat_template.jinja").write_text(longest + "x")
    with pytest.raises(ModelError, match=r"chat_template\.jinja has more than 4194304 bytes"):
        read_chat_template(tmp_path)
    with pytest.raises(ModelError, match=r"chat templates of 4194305 bytes, and at most 4194304 .* with tokenizer="):
        tokenizer_files(byte_level("gpt-2", chat_template=longest + "x"))


def test_one_chat_template_is_a_file(tmp_path):
    write(tmp_path, byte_level("gpt-2", chat_template="{{ 'é' }}"))
    assert (tmp_path / "chat_template.jinja").read_bytes().decode() == "{{ 'é' }}"
    assert read_chat_template(tmp_path, for_tools=True) == "{{ 'é' }}"


def test_several_chat_templates_are_found_by_name(tmp_path):
    templates = {"chat_template": "A", "tokenizer.chat_template.tool_use": "B", "tokenizer.chat_template.../x": "C"}
    files = tokenizer_files(byte_level("gpt-2", **templates, **{"tokenizer.chat_templates": ["tool_use", "../x"]}))
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json"}
    folder = write(tmp_path, byte_level("gpt-2", **templates))
    assert (read_chat_template(folder), read_chat_template(folder, for_tools=True)) == ("A", "B")
    hf = load(folder).hf
    assert (hf.get_chat_template(), hf.get_chat_template(tools=[{}]), hf.get_chat_template("../x")) == ("A", "B", "C")


@pytest.mark.parametrize("template", [None, " \n"])
def test_without_a_chat_template_there_is_no_file(tmp_path, template):
    write(tmp_path, byte_level("gpt-2", **({"chat_template": template} if template else {})))
    assert read_chat_template(tmp_path) is None


# Generation defaults


def vocabulary(*tokens: str, kinds=(), **more) -> GGUFModel:
    kinds = {**dict.fromkeys(tokens, CONTROL), **dict(kinds)}
    return model(**{"model": "gpt2", "tokens": list(tokens), "token_type": [kinds[t] for t in tokens], **more})


END_IDS = {
    "named ones first": (vocabulary(*"ab", "<eos>", "c", eos_token_id=3, eot_token_id=1, eom_token_id=0), [3, 1, 0, 2]),
    "known texts": (vocabulary("<|endoftext|>", "<|im_end|>", "x", "<end_of_turn>"), [0, 1, 3]),
    "a message is not the end": (vocabulary("<|return|>", "<|call|>", "<|end|>"), [0, 1]),
    "a message is the end": (vocabulary("<|user|>", "<|end|>"), [1]),
    "sentencepiece": (vocabulary("<unk>", "<s>", "</s>", model="llama"), [2]),
    "an HTML element": (vocabulary("<eos>", "</s>", kinds={"</s>": USER_DEFINED}), [0]),
    "none": (vocabulary("a"), None),
    "outside the vocabulary": (vocabulary("a", "<eos>", eos_token_id=7), [1]),
}  # fmt: skip


@pytest.mark.parametrize(("gguf", "expected"), END_IDS.values(), ids=END_IDS)
def test_tokens_that_end_a_sequence(gguf, expected):
    assert generation_config(gguf).get("eos_token_id") == expected


def test_sampling_defaults_and_special_tokens():
    sampling = {"temp": 0.6000000238418579, "top_k": 20, "xtc_threshold": 1}
    named = {f"general.sampling.{name}": value for name, value in sampling.items()}
    gguf = vocabulary("a", "b", bos_token_id=0, padding_token_id=1, **named)
    assert generation_config(gguf) == {"bos_token_id": 0, "pad_token_id": 1, "temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize("value", [float("nan"), "hot", True])
def test_a_sampling_default_that_is_not_a_number_is_refused(value):
    with pytest.raises(ModelError, match=r"sampling\.temp"):
        generation_config(vocabulary("a", **{"general.sampling.temp": value}))


def test_a_file_without_vocabulary_has_sampling_defaults_only() -> None:
    model = GGUFModel((Path("x.gguf"),), {"tokenizer.ggml.model": "no_vocab", "general.sampling.top_k": 20}, {})
    assert generation_config(model) == {"top_k": 20}
    with pytest.raises(ModelError, match="with tokenizer="):
        tokenizer_files(model)


# Damaged files

DAMAGED = {
    "no tokenizer": ({"model": None}, "has no tokenizer"),
    "an unknown kind": ({"model": "rwkv"}, "Supported: gpt2, llama"),
    "an unknown split": ({"pre": "future"}, "'future'.*Supported: .*qwen2"),
    "no tokens": ({"tokens": []}, "0 tokens"),
    "too many characters": ({"tokens": ["a" * (1 << 22), "b" * (1 << 22), "c", "d"]}, "characters together"),
    "numbers as tokens": ({"tokens": [1, 2]}, "list of texts"),
    "no merges": ({"merges": None}, "tokenizer.ggml.merges"),
    "a token twice": ({"tokens": ["a", "b", "c", "b"]}, "tokens 1 and 3 are both 'b'"),
    "bytes that are no text": ({"tokens": ["a", "b", "c", "\udcff"]}, r"token 3 is b'\\xff'"),
    "too few types": ({"token_type": [1, 1]}, "2 values, but there are 4 tokens"),
    "types that are no numbers": ({"token_type": ["1"] * 4}, "list of numbers"),
    "too many scores": ({"scores": [0.0] * 5}, "5 values"),
    "scores that are no numbers": ({"scores": [0.0, 1.0, float("nan"), 0.0]}, "not finite"),
    "a text as flag": ({"add_bos_token": "yes"}, "true or false"),
    "bos without an id": ({"add_bos_token": True}, "bos_token_id"),
    "an id that is no number": ({"eos_token_id": "x"}, "id of a token"),
    "no scores": ({"model": "llama"}, "without 'tokenizer.ggml.scores'"),
    "long tokens": ({"model": "llama", "scores": [0.0] * 4, "tokens": ["a", "b", "c", "a" * 20_000]}, "too long"),
}


@pytest.mark.parametrize(("changes", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_metadata_is_refused_with_a_reason(changes, message):
    metadata = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "c", "ab"], "merges": ["a b"], **changes}
    with pytest.raises(ModelError, match=message):
        tokenizer_files(model(**{name: value for name, value in metadata.items() if value is not None}))


def test_merges_without_tokens_and_repeated_merges_are_ignored(caplog):
    merges = ["a b", "b c", "x y", "ab", " c", "a b", "b", ""]
    with caplog.at_level("WARNING"):
        tokenizer = built(model(model="gpt2", pre="gpt-2", tokens=["a", "b", "c", "ab", "bc"], merges=merges))
    assert tokenizer.encode("abc").tokens == ["ab", "c"]
    assert "6 of 8 merges" in caplog.text


def test_too_many_merges_are_refused(monkeypatch):
    monkeypatch.setattr("mvllm_gguf.merges._MOST_MERGES", 1)
    with pytest.raises(ModelError, match="2 merges; 1 are allowed"):
        tokenizer_files(model(model="gpt2", pre="gpt-2", tokens=["a", "b", "ab", "ba"], merges=["a b", "b a"]))


def test_empty_and_broken_tokens_keep_the_ids_of_the_others():
    tokens = ["<unk>", "", "a", "\udcff", "b", "\udcfe", "ab"]
    gguf = model(model="llama", tokens=tokens, scores=[0.0] * 7, add_bos_token=False, add_space_prefix=False)
    assert built(gguf).encode("abab").ids == [6, 6]
    assert built(gguf).get_vocab_size() == 7


def test_ids_outside_the_vocabulary_are_ignored_with_a_warning(caplog):
    with caplog.at_level("WARNING"):
        settings = json.loads(tokenizer_files(byte_level("gpt-2", unknown_token_id=9999))["tokenizer_config.json"])
    assert "unk_token" not in settings
    assert "unknown_token_id is 9999" in caplog.text


# Published files


@pytest.mark.parametrize("name", FILES)
def test_token_ids_of_published_files_equal_those_of_transformers(tmp_path, name):
    """transformers uses one pre-tokenizer for all GGUF files, so the test replaces it by the family's."""
    path = find_published(name) or pytest.skip(MISSING)
    gguf = read_gguf(path)
    loaded = load(write(tmp_path, gguf, {"gemma3": "gemma3_text"}.get(gguf.metadata["general.architecture"], "llama")))
    ids = [loaded.encode(text) for text in TEXTS]
    decoded = [loaded.decode(each) for each in ids]
    assert "hf" not in vars(loaded)
    expected = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).backend_tokenizer
    if gguf.metadata["tokenizer.ggml.model"] == "gpt2":
        expected.pre_tokenizer = loaded.backend.pre_tokenizer
    assert ids == [expected.encode(text).ids for text in TEXTS]
    assert decoded == [expected.decode(each) for each in ids]
