"""The demo model that ships with the package, run by transformers: its perplexity, and its answers."""

from __future__ import annotations

import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ci.demo_model import corpus, stories, train
from ci.demo_model.chats import Message
from mvllm.demo import demo_model_path
from tests.e2e.demo_model_expectations import COMPLETIONS, REPLIES, messages, says

# Measured in float32 (see ci/demo_model/README.md), with a margin of a few percent.
MAX_HELDOUT_PERPLEXITY = 1.62
MAX_STORY_PERPLEXITY = 1.36


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model_path())


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()


def test_it_is_small_and_holds_bfloat16_weights():
    folder = demo_model_path()
    config = json.loads((folder / "config.json").read_text())
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 8_000_000
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["num_key_value_heads"] < config["num_attention_heads"]


def test_it_predicts_heldout_text(model, tokenizer):
    texts = list(corpus.documents("heldout", 200))
    assert 1.0 < train.perplexity(model, tokenizer, texts) < MAX_HELDOUT_PERPLEXITY


def test_it_predicts_stories_with_unseen_pairs_of_hero_and_plot(model, tokenizer):
    assert 1.0 < train.perplexity(model, tokenizer, corpus.heldout_stories(40)) < MAX_STORY_PERPLEXITY


@pytest.mark.parametrize("prompt", COMPLETIONS)
def test_it_completes_plain_text(model, tokenizer, prompt):
    text = train.complete(model, tokenizer, tokenizer.encode(prompt))
    assert says(text, COMPLETIONS[prompt]), text


@pytest.mark.parametrize("chat", REPLIES, ids=lambda chat: chat[-1][1])
def test_it_replies_in_a_conversation(model, tokenizer, chat):
    token_ids = tokenizer.apply_chat_template(messages(chat), add_generation_prompt=True, return_dict=False)
    text = train.complete(model, tokenizer, token_ids)
    assert says(text, REPLIES[chat]), text


@pytest.mark.parametrize(
    "request_text", ["Tell me a story about a fox named Nia.", "Tell me a story about Tom the bear."]
)
def test_a_story_keeps_its_hero_and_comes_to_an_end(model, tokenizer, request_text):
    token_ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": request_text}], add_generation_prompt=True, return_dict=False
    )
    prompt = torch.tensor([token_ids])
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=400, do_sample=False)
    story = tokenizer.decode(output[0, len(token_ids) :], skip_special_tokens=True)
    name, kind = ("Nia", "fox") if "Nia" in request_text else ("Tom", "bear")
    assert story.count(name) >= 4 and kind in story, story
    assert output[0, -1] in model.generation_config.eos_token_id, "the story did not end"


def test_the_chat_template_gives_the_training_format(tokenizer):
    chat = [Message("system", "Be kind."), Message("user", "Hello!")]
    written = tokenizer.apply_chat_template(
        [{"role": message.role, "content": message.content} for message in chat],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert written == corpus.render_chat(chat, add_generation_prompt=True)


def test_the_tokenizer_adds_one_bos_token_and_decodes_every_text(tokenizer):
    text = "Zoë has 1,234 apples — naïve?\n\tYes! 日本"
    token_ids = tokenizer.encode(text)
    assert token_ids.count(tokenizer.bos_token_id) == 1 and token_ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == text


def test_the_model_was_trained_on_the_current_corpus():
    figures = json.loads((demo_model_path().parent / "figures.json").read_text())
    assert figures["corpus_fingerprint"] == corpus.fingerprint(), "the corpus changed: train the model anew"


def test_documents_depend_on_split_and_index_only():
    assert corpus.document("train", 7) == corpus.document("train", 7)
    assert corpus.document("train", 7) != corpus.document("heldout", 7)
    with pytest.raises(ValueError, match=r"'test'.*'train' and 'heldout'"):
        corpus.document("test", 0)


def test_training_and_heldout_stories_share_no_pair_of_hero_and_plot():
    rng = random.Random(0)
    names = stories.GIRL_NAMES + stories.BOY_NAMES
    with_reserved = [name for name in names if any(stories.is_reserved(name, plot) for plot in stories.PLOTS)]
    assert len(with_reserved) > len(names) // 4
    for name in with_reserved:
        assert stories.is_reserved(name, stories.draw_plot(rng, name, held_out=True))
        assert not stories.is_reserved(name, stories.draw_plot(rng, name, held_out=False))
