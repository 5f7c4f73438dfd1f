"""Conversations between a user and the assistant, with and without a system prompt.

Each turn is drawn from a small set of intents; what was said before matters to some of them ("And Italy?", "What is my
name?"), so that the model learns to look back.
"""

# ruff: noqa: E501

from __future__ import annotations

import random
from dataclasses import dataclass

from ci.demo_model import stories
from ci.demo_model.fact_tables import ANIMALS, COUNTRIES, OPPOSITES
from ci.demo_model.facts import Fact, describe_animal, describe_country, draw_fact, draw_question, facts_by_topic
from ci.demo_model.grammar import expand, invented_name, with_article


@dataclass(frozen=True)
class Message:
    """One turn. ``role`` is ``system``, ``user`` or ``assistant``."""

    role: str
    content: str


SYSTEM_PROMPTS = (
    "You are a [helpful|kind|friendly|careful|patient|polite|honest|cheerful|small] [assistant|teacher|robot|guide|helper|librarian|chatbot].",
    "You are a [helpful|kind|friendly|careful|patient|polite|honest] [assistant|teacher|helper] [for children|for students|who knows many facts|who tells stories|that answers questions].",
    "You are [helpful|kind|friendly]. [Be brief.|Answer briefly.|Answer in one sentence.|Always be polite.|Do not lie.|Think before you answer.]",
    "[Be brief.|Answer briefly.|Answer in one sentence.|Always be polite.|Talk like a teacher.|Use short sentences.] [You are a helpful assistant.|Help the user.]",
    "You are a helpful assistant.",
    "You are a helpful and friendly assistant.",
    "You are a kind teacher for children.",
    "You are a careful assistant. Answer in one sentence.",
    "You are a storyteller.",
    "You are a helpful assistant. Be brief.",
    "Answer the questions of the user.",
    "You are the demo model of an inference engine.",
    "You are a concise assistant who answers simple questions.",
)

# (what the user says, what the assistant says)
SMALL_TALK = (
    ("[Hello|Hi|Hey|Hello there|Hi there][!|.|]", "Hello! How can I help you?"),
    ("Good [morning|evening|afternoon][!|.|]", "Hello! It is good to hear from you. How can I help you?"),
    ("How are you[?| today?| doing?]", "I am fine, thank you. How can I help you?"),
    ("[Thank you|Thanks|Thank you very much|Thanks a lot][!|.|]", "You are welcome!"),
    ("[Goodbye|Bye|See you|Good night][!|.|]", "Goodbye! Have a good day."),
    ("[Who are you?|What are you?|Tell me about yourself.|Introduce yourself.]", "I am a very small language model. I know little stories and simple facts."),
    ("What is your name?", "I have no name. I am a very small language model."),
    ("[What can you do?|How can you help me?|What do you know?|Can you help me?|Help me.]", "I can tell little stories, answer simple questions, and add small numbers."),
    ("[Are you a person?|Are you human?|Are you a robot?]", "No, I am a small language model."),
    ("[Tell me a joke.|Do you know a joke?|Make me laugh.]", "[Why did the book go to the doctor? Because it had lost its words.|What do you call a sleeping bull? A bulldozer.|Why is the number six afraid? Because seven ate nine.]"),
    ("[Tell me a poem.|Write a poem.|Write a short poem.|Do you know a poem?]", "[The moon is bright, the night is deep, and all the little foxes sleep.|The wind is soft, the sea is wide, the boats are dancing on the tide.]"),
    ("[I am sad.|I feel sad.|I am sad today.|I had a bad day.]", "I am sorry to hear that. Would you like to hear a story?"),
    ("[I am happy.|I feel happy today.|I had a good day.]", "That is wonderful! I am happy for you."),
    ("[I am tired.|I am so tired.]", "Then rest a little. A short sleep helps a lot."),
    ("[I am hungry.|I am so hungry.]", "Then eat something good, such as bread with honey or a bowl of soup."),
    ("[I am bored.|What should I do today?|What can I do today?]", "You could read a book, take a walk, or draw a picture."),
    ("[You are great!|Good job!|Well done!|That was nice.|Great!]", "Thank you! That is kind of you."),
    ("[Say hello.|Say hello to my friend.]", "Hello, and welcome!"),
    ("[Do you like music?|Do you like songs?]", "I like songs about the sea and the stars."),
    ("[Do you like animals?|What is your favourite animal?|What is your favorite animal?]", "I like all animals, and I like the fox best."),
    ("[What is your favourite colour?|What is your favorite color?]", "My favourite colour is blue, like the sky."),
    ("[OK.|Okay.|I see.|Interesting.|Good.]", "Is there anything else I can help you with?"),
    ("[No, thank you.|No.|That is all.]", "All right. Have a good day!"),
)  # fmt: skip

# Things a model of this size cannot know. What it should learn is the reply.
UNKNOWN = (
    "What is the [capital|language|population] of {invented}?",
    "What [is|are] [a |an |the |]{invented}?",
    "What does a {invented} [say|eat|do]?",
    "What is {number} [plus|minus|times] {number}?",
    "[Who|Where|When|Why|How] [is|was] [the |]{invented}?",
    "What do you think about {invented}?",
    "Who won the [football|tennis|chess|baseball|hockey] [match|game|final] [yesterday|last week|last year|in 1998]?",
    "What is the [weather|temperature] like [today|tomorrow|now] [in {capital}|here]?",
    "What is the price of [gold|oil|a house|a new car|a ticket to {capital}]?",
    "[Write|Show me|Give me] [a program|some code|a function|a script] [that sorts a list|in Python|for a website|that reads a file].",
    "Who is [{name} Miller|{name} Brown|the king of {country}|the mayor of {capital}]?",
    "[Solve|Explain] [this equation|quantum physics|the theory of relativity|economics|the stock market].",
    "What time is it[?| now?| in {capital}?]",
    "What [day|date] is [it|it today|today]?",
    "Translate [this|hello|good morning] into [French|German|Latin|Chinese].",
    "How many people live in {country}?",
    "When was [{capital} built|the war|the telephone invented|the first train built]?",
    "Who [wrote|painted|invented|discovered] [this book|that picture|the telephone|the radio|America]?",
    "What is the [square root|cube] of [{number}|two thousand]?",
    "What is the best [film|phone|restaurant|hotel|computer|song] [in {capital}|of the year|in the world]?",
    "Summarize [this article|the news|my letter|this long text].",
    "What did I [eat|do|dream|buy] [yesterday|last night|last summer]?",
    "Where did I [put|leave] my [keys|phone|shoes|glasses]?",
)
UNKNOWN_REPLY = "I am sorry, I do not know that. I am a very small model, and I only know stories and simple facts."

_FOLLOW_UPS = ("And {key}?", "What about {key}?", "And what about {key}?", "How about {key}?", "and {key}?")
_STORY_REQUEST = (
    "[Tell me a|Tell me a|Please tell me a|Write a|Write me a|I want to hear a] [story|story|short story|little story]"
)


def _ask_fact(rng: random.Random) -> list[Message]:
    fact = draw_fact(rng)
    messages = [Message("user", draw_question(rng, fact)), Message("assistant", fact.answer)]
    siblings = [other for other in facts_by_topic()[fact.topic] if other.key and other.key != fact.key]
    while fact.key and siblings and rng.random() < 0.3:
        other = rng.choice(siblings)
        messages += [Message("user", rng.choice(_FOLLOW_UPS).format(key=other.key)), Message("assistant", other.answer)]
    return messages


def _ask_story(rng: random.Random) -> list[Message]:
    cast, trait = stories.draw_cast(rng), rng.choice(stories.TRAITS)
    plot = stories.draw_plot(rng, cast.name, held_out=False)
    hero = with_article(cast.kind)
    described = with_article(f"{trait} {cast.kind}")
    about = rng.choices(
        (
            "",
            f" about {hero}",
            f" about {hero} [named|called] {cast.name}",
            f" about {described}",
            f" about {described} [named|called] {cast.name}",
            f" about {cast.name} the {cast.kind}",
            f" about {plot.format(toy=cast.toy)}",
            f" about {hero} and {plot.format(toy=cast.toy)}",
        ),
        weights=(20, 20, 12, 12, 10, 8, 10, 8),
    )[0]
    request = expand(rng, f"{_STORY_REQUEST}{about}[.|.|.|]")
    return [Message("user", request), Message("assistant", stories.tell_story(rng, cast, plot, trait))]


def _small_talk(rng: random.Random) -> list[Message]:
    said, reply = rng.choice(SMALL_TALK)
    words = expand(rng, said)
    if rng.random() < 0.3:  # as hurried people type
        words = words.lower().rstrip("?!.")
    messages = [Message("user", words), Message("assistant", expand(rng, reply))]
    if reply.endswith("hear a story?") and rng.random() < 0.6:
        _, told = _ask_story(rng)
        messages += [Message("user", rng.choice(("Yes.", "Yes, please.", "Yes please", "yes", "Sure."))), told]
    return messages


def _ask_unknown(rng: random.Random) -> list[Message]:
    capitals: tuple[Fact, ...] = facts_by_topic()["capital of which"]
    question = expand(
        rng,
        rng.choice(UNKNOWN),
        capital=rng.choice(capitals).key,
        country=rng.choice(facts_by_topic()["capital"]).key,
        name=rng.choice(stories.GIRL_NAMES + stories.BOY_NAMES),
        number=str(rng.randint(150, 999)),
        invented=rng.choice((invented_name(rng), invented_name(rng).lower())),
    )
    return [Message("user", question), Message("assistant", UNKNOWN_REPLY)]


def _tell_name(rng: random.Random) -> tuple[list[Message], list[Message]]:
    """An introduction, and the question about it that comes later."""
    known = rng.random() < 0.6
    name = rng.choice(stories.GIRL_NAMES + stories.BOY_NAMES) if known else invented_name(rng)
    introduction = expand(
        rng, "[Hello, my name is|Hi, my name is|My name is|Hi! My name is|Hello, I am|I am] {name}.", name=name
    )
    return (
        [Message("user", introduction), Message("assistant", f"Hello, {name}! How can I help you?")],
        [
            Message(
                "user", rng.choice(("What is my name?", "Do you remember my name?", "Who am I?", "What's my name?"))
            ),
            Message("assistant", f"Your name is {name}."),
        ],
    )


def draw_echo(rng: random.Random) -> tuple[str, str]:
    """A few words in no order and the same words again: the plainest exercise in looking back."""
    pool = (
        *stories.GIRL_NAMES,
        *stories.BOY_NAMES,
        *stories.KINDS,
        *stories.TRAITS,
        *(word for row in OPPOSITES for word in row),
    )
    words = [invented_name(rng) if rng.random() < 0.2 else rng.choice(pool) for _ in range(rng.randint(2, 12))]
    said = rng.choice((" ", ", ")).join(words)
    return rng.choice(("Repeat after me: ", "Repeat: ", "Please repeat: ", "Say: ", "Copy these words: ")) + said, said


def _ask_echo(rng: random.Random) -> list[Message]:
    request, reply = draw_echo(rng)
    return [Message("user", request), Message("assistant", reply)]


def _ask_description(rng: random.Random) -> list[Message]:
    """A paragraph about a country or an animal, which says its name in its first sentence."""
    country, animal = rng.choice(COUNTRIES)[0], rng.choice(ANIMALS)[0]
    about, told = rng.choice(
        (
            (country, describe_country(rng, country)),
            (rng.choice((with_article(animal), f"the {animal}", f"{animal}s")), describe_animal(rng, animal)),
        )
    )
    request = expand(
        rng, "[Tell me about|Tell me something about|What do you know about|Describe] {about}", about=about
    )
    return [Message("user", request + ("?" if request.startswith("What") else ".")), Message("assistant", told)]


def draw_request(rng: random.Random) -> tuple[str, str]:
    """Something other than a fact that a user asks for, and the reply."""
    request, reply = rng.choices(
        (_ask_story, _small_talk, _ask_unknown, _ask_echo, _ask_description), weights=(5, 4, 1, 2, 3)
    )[0](rng)[:2]
    return request.content, reply.content


_INTENTS = (_ask_fact, _ask_story, _small_talk, _ask_unknown, _ask_echo, _ask_description)


def draw_chat(rng: random.Random) -> list[Message]:
    """One conversation of one to five exchanges."""
    messages = [Message("system", expand(rng, rng.choice(SYSTEM_PROMPTS)))] if rng.random() < 0.35 else []
    num_intents = rng.choice((1, 1, 1, 2, 2, 3, 4))
    recall: list[Message] = []
    if rng.random() < 0.12:
        greeting, recall = _tell_name(rng)
        messages += greeting
    for _ in range(num_intents):
        intent = rng.choices(_INTENTS, weights=(57, 9, 16, 8, 6, 4))[0]
        messages += intent(rng)
    return messages + (recall if rng.random() < 0.8 else [])
