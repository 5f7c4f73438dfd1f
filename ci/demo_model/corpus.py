"""The text the demo model is trained on: an endless, deterministic stream of small documents.

One generator state per document, seeded with its split and index, so document 1,000 of the training split is the same
text on every machine, for every reader and in any order::

    corpus.document("train", 1000)
    list(corpus.documents("heldout", 200))

The ``heldout`` split differs from ``train`` in its seeds, and in its stories: a hero's name and a plot that meet there
never meet in training (``stories.is_reserved``).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from hashlib import sha256

from ci.demo_model import fact_tables, stories
from ci.demo_model.chats import Message, draw_chat, draw_echo, draw_request
from ci.demo_model.facts import describe_animal, describe_country, draw_fact, draw_question

BOS, EOS = "<|bos|>", "<|eos|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (BOS, EOS, TURN_START, TURN_END)

# Writes what `render_chat` writes; a test compares the two.
CHAT_TEMPLATE = (
    "{{- '" + BOS + "' -}}"
    "{%- for message in messages -%}"
    "{{- '" + TURN_START + "' + message['role'] + '\\n' + message['content'] + '" + TURN_END + "\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '" + TURN_START + "assistant\\n' -}}{%- endif -%}"
)


def render_chat(messages: list[Message], add_generation_prompt: bool = False) -> str:
    """The text of a conversation, as the chat template writes it."""
    turns = [f"{TURN_START}{message.role}\n{message.content}{TURN_END}\n" for message in messages]
    return BOS + "".join(turns) + (f"{TURN_START}assistant\n" if add_generation_prompt else "")


def _plain(text: str) -> str:
    return BOS + text + EOS


def _story(rng: random.Random, held_out: bool) -> str:
    return _plain(stories.draw_story(rng, held_out))


def _chat(rng: random.Random, held_out: bool) -> str:
    return render_chat(draw_chat(rng))


def _statement(rng: random.Random, held_out: bool) -> str:
    """One fact as a sentence, sometimes a few."""
    num_facts = rng.choice((1, 1, 1, 1, 2, 3))
    return _plain(" ".join(draw_fact(rng).answer for _ in range(num_facts)))


def _description(rng: random.Random, held_out: bool) -> str:
    return _plain(rng.choice((describe_country, describe_country, describe_animal))(rng))


def _question(rng: random.Random, held_out: bool) -> str:
    """A question and its answer as plain text, the way people prompt a model that has no chat template."""
    template = rng.choice(
        (
            "{question} {answer}",
            "{question} {answer}",
            "{question}\n{answer}",
            "Question: {question}\nAnswer: {answer}",
            "Q: {question}\nA: {answer}",
        )
    )
    num_facts = 1 if "\n" not in template else rng.choice((1, 1, 2, 3))
    pairs = []
    for _ in range(num_facts):
        fact = draw_fact(rng)
        pairs.append(template.format(question=draw_question(rng, fact), answer=fact.answer))
    return _plain("\n".join(pairs))


def _request(rng: random.Random, held_out: bool) -> str:
    """A wish and its fulfilment, again without a chat template."""
    wish, reply = draw_request(rng)
    return _plain(rng.choice((f"{wish} {reply}", f"{wish}\n{reply}", f"{wish}\n\n{reply}")))


def _echo(rng: random.Random, held_out: bool) -> str:
    request, reply = draw_echo(rng)
    return _plain(f"{request}\n{reply}")


def _engine(rng: random.Random, held_out: bool) -> str:
    sentences = rng.sample(fact_tables.ENGINE_SENTENCES, rng.randint(2, 5))
    return _plain(" ".join(sentences))


def _completion(rng: random.Random, held_out: bool) -> str:
    beginning, endings = rng.choice(fact_tables.COMPLETIONS)
    return _plain(f"{beginning} {rng.choice(endings)}")


def _introduction(rng: random.Random, held_out: bool) -> str:
    name = rng.choice(stories.GIRL_NAMES + stories.BOY_NAMES)
    country, capital, _, language = rng.choice(fact_tables.COUNTRIES)
    greeting = rng.choice(("Hello, my name is", "My name is", "Hi, my name is", "Hello, I am"))
    job = rng.choice(fact_tables.JOBS)[0]
    place = rng.choice((f"I live in {capital}", f"I come from {country} and I speak {language}"))
    article = "an" if job[0] in "aeiou" else "a"
    return _plain(f"{greeting} {name}. {place}. I am {article} {job}, and I like my work.")


# What to write, and how many documents in a hundred are of that kind.
_MIXTURE = (
    (_chat, 35),
    (_story, 11),
    (_statement, 10),
    (_question, 15),
    (_request, 6),
    (_echo, 9),
    (_description, 6),
    (_engine, 2),
    (_completion, 4),
    (_introduction, 2),
)


def document(split: str, index: int) -> str:
    """The document number ``index`` of a split, special tokens included.

    Args:
        split: ``"train"`` or ``"heldout"``.
        index: any non-negative number; the stream has no end.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split is {split!r}; permitted are 'train' and 'heldout'")
    rng = random.Random(f"{split}/{index}")
    write = rng.choices([kind for kind, _ in _MIXTURE], weights=[weight for _, weight in _MIXTURE])[0]
    return write(rng, split == "heldout")


def documents(split: str, num_documents: int) -> Iterator[str]:
    """The first ``num_documents`` documents of a split."""
    return (document(split, index) for index in range(num_documents))


def heldout_stories(num_stories: int) -> list[str]:
    """Stories whose hero and plot never meet in training; nothing in them can be recalled, only told."""
    return [_story(random.Random(f"heldout-story/{index}"), True) for index in range(num_stories)]


def fingerprint(num_documents: int = 2000) -> str:
    """Checksum of the first training documents: tells whether a model was trained on the corpus as it stands now."""
    digest = sha256()
    for text in documents("train", num_documents):
        digest.update(text.encode())
    return digest.hexdigest()
