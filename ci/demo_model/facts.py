"""Questions with one right answer, and sentences that state the same facts.

The idea: a fact is a table row run through the phrasings of its topic. Every phrasing of a question leads to the
same answer sentence, so that the model learns the fact and not the wording.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from ci.demo_model import fact_tables as tables
from ci.demo_model.grammar import capitalized, join_words, with_article


@dataclass(frozen=True)
class Fact:
    """One fact.

    Attributes:
        topic: facts of the same topic can follow each other in a conversation.
        key: what the fact is about ("Italy"), for follow-ups such as "And Italy?"; empty when none makes sense.
        questions: every way of asking; at least one.
        answer: the full sentence that answers each of them and also stands alone.
    """

    topic: str
    key: str
    questions: tuple[str, ...]
    answer: str


def _capitals() -> list[Fact]:
    facts = []
    for country, capital, continent, language in tables.COUNTRIES:
        facts.append(
            Fact(
                "capital",
                country,
                (
                    f"What is the capital of {country}?",
                    f"What is the capital city of {country}?",
                    f"What's the capital of {country}?",
                    f"Which city is the capital of {country}?",
                    f"Can you tell me the capital of {country}?",
                    f"Do you know the capital of {country}?",
                    f"Tell me the capital of {country}.",
                    f"Name the capital of {country}.",
                    f"{capitalized(country)}: what is its capital?",
                    f"Capital of {country}?",
                ),
                f"The capital of {country} is {capital}.",
            )
        )
        facts.append(
            Fact(
                "capital of which",
                capital,
                (
                    f"{capital} is the capital of which country?",
                    f"Which country has {capital} as its capital?",
                    f"Where is {capital}?",
                    f"In which country is {capital}?",
                ),
                f"{capital} is the capital of {country}.",
            )
        )
        facts.append(
            Fact(
                "continent",
                country,
                (
                    f"Where is {country}?",
                    f"On which continent is {country}?",
                    f"Which continent is {country} in?",
                    f"In which part of the world is {country}?",
                ),
                f"{capitalized(country)} is in {continent}.",
            )
        )
        facts.append(
            Fact(
                "language",
                country,
                (
                    f"What language do people speak in {country}?",
                    f"Which language is spoken in {country}?",
                    f"What do people speak in {country}?",
                ),
                f"People in {country} speak {language}.",
            )
        )
    return facts


def _animals() -> list[Fact]:
    facts = []
    for name, sound, baby, home, food, num_legs, skill in tables.ANIMALS:
        one = with_article(name)
        if sound:
            facts.append(
                Fact(
                    "animal sound",
                    one,
                    (
                        f"What does {one} say?",
                        f"What sound does {one} make?",
                        f"Which sound does {one} make?",
                        f"What noise does {one} make?",
                        f"What does the {name} say?",
                        f"How does {one} sound?",
                    ),
                    f"{capitalized(one)} says {sound}.",
                )
            )
        facts.append(
            Fact(
                "animal baby",
                one,
                (
                    f"What is a baby {name} called?",
                    f"What do you call a baby {name}?",
                    f"What is a young {name} called?",
                    f"What is the name for a baby {name}?",
                ),
                f"A baby {name} is called {with_article(baby)}.",
            )
        )
        facts.append(
            Fact(
                "animal home",
                one,
                (f"Where does {one} live?", f"What is the home of {one}?", f"Where can you find {one}?"),
                f"{capitalized(one)} lives {home}.",
            )
        )
        facts.append(
            Fact(
                "animal food",
                one,
                (f"What does {one} eat?", f"What food does {one} like?", f"What does {one} like to eat?"),
                f"{capitalized(one)} eats {food}.",
            )
        )
        facts.append(
            Fact(
                "animal legs",
                one,
                (f"How many legs does {one} have?", f"How many legs has {one} got?"),
                f"{capitalized(one)} has {num_legs} legs.",
            )
        )
        facts.append(
            Fact(
                "animal skill",
                one,
                (f"What can {one} do?", f"What is {one} good at?"),
                f"{capitalized(one)} can {skill}.",
            )
        )
    return facts


def _colours() -> list[Fact]:
    facts = []
    for thing, colour, wrong in tables.COLOURS:
        facts.append(
            Fact(
                "colour",
                thing,
                (
                    f"What colour is {thing}?",
                    f"What color is {thing}?",
                    f"Which colour is {thing}?",
                    f"What is the colour of {thing}?",
                    f"What is the color of {thing}?",
                    f"Tell me the colour of {thing}.",
                ),
                f"{capitalized(thing)} is {colour}.",
            )
        )
        facts.append(Fact("colour yes", "", (f"Is {thing} {colour}?",), f"Yes, {thing} is {colour}."))
        facts.append(Fact("colour no", "", (f"Is {thing} {wrong}?",), f"No, {thing} is {colour}."))
    return facts


def _opposites() -> list[Fact]:
    pairs = [*tables.OPPOSITES, *((b, a) for a, b in tables.OPPOSITES)]
    return [
        Fact(
            "opposite",
            word,
            (
                f"What is the opposite of {word}?",
                f"What's the opposite of {word}?",
                f"Which word is the opposite of {word}?",
                f"Tell me the opposite of {word}.",
                f"Give me the opposite of {word}.",
            ),
            f"The opposite of {word} is {other}.",
        )
        for word, other in pairs
    ]


def _cycles() -> list[Fact]:
    facts = []
    for topic, names in (("day", tables.DAYS), ("month", tables.MONTHS), ("season", tables.SEASONS)):
        for index, name in enumerate(names):
            following, preceding = names[(index + 1) % len(names)], names[index - 1]
            facts.append(
                Fact(
                    f"{topic} after",
                    name,
                    (
                        f"What {topic} comes after {name}?",
                        f"Which {topic} comes after {name}?",
                        f"Which {topic} follows {name}?",
                        f"What comes after {name}?",
                        f"What {topic} is after {name}?",
                    ),
                    f"The {topic} after {name} is {following}.",
                )
            )
            facts.append(
                Fact(
                    f"{topic} before",
                    name,
                    (
                        f"What {topic} comes before {name}?",
                        f"Which {topic} comes before {name}?",
                        f"What comes before {name}?",
                        f"What {topic} is before {name}?",
                    ),
                    f"The {topic} before {name} is {preceding}.",
                )
            )
    for index, planet in enumerate(tables.PLANETS[:-1]):
        facts.append(
            Fact(
                "planet after",
                planet,
                (f"Which planet comes after {planet}?", f"What planet comes after {planet}?"),
                f"The planet after {planet} is {tables.PLANETS[index + 1]}.",
            )
        )
    for first, second in zip("ABCDEFGHIJKLMNOPQRSTUVWXY", "BCDEFGHIJKLMNOPQRSTUVWXYZ", strict=True):
        facts.append(
            Fact(
                "letter after",
                first,
                (f"Which letter comes after {first}?", f"What letter comes after {first}?"),
                f"The letter after {first} is {second}.",
            )
        )
    return facts


def _arithmetic() -> list[Fact]:
    """Sums up to 10 + 10, differences of numbers up to 10, and products up to 10 x 10."""
    rows = [("plus", "+", a, b, a + b) for a in range(11) for b in range(11)]
    rows += [("minus", "-", a, b, a - b) for a in range(11) for b in range(a + 1)]
    rows += [("times", "*", a, b, a * b) for a in range(1, 11) for b in range(1, 11)]
    return [
        Fact(
            f"arithmetic {word}",
            f"{a} {word} {b}",
            (
                f"What is {a} {word} {b}?",
                f"What is {a} {sign} {b}?",
                f"How much is {a} {word} {b}?",
                f"What's {a} {sign} {b}?",
                f"{a} {sign} {b} = ?",
                f"What is {a}{sign}{b}?",
                f"{a}{sign}{b}",
            ),
            f"{a} {word} {b} is {result}.",
        )
        for word, sign, a, b, result in rows
    ]


def _numbers() -> list[Fact]:
    facts = []
    for number in range(1, 31):
        facts.append(
            Fact(
                "number after",
                str(number),
                (f"What number comes after {number}?", f"Which number comes after {number}?"),
                f"The number after {number} is {number + 1}.",
            )
        )
    for end in (3, 5, 10):
        count = ", ".join(str(number) for number in range(1, end + 1))
        facts.append(
            Fact(
                "counting", "", (f"Count to {end}.", f"Can you count to {end}?", f"Count from 1 to {end}."), f"{count}."
            )
        )
    return facts


def _categories() -> list[Fact]:
    facts = []
    for group, plural, members in tables.CATEGORIES:
        for index, member in enumerate(members):
            one = with_article(member)
            facts.append(
                Fact(
                    "category",
                    one,
                    (f"What is {one}?", f"What kind of thing is {one}?"),
                    f"{capitalized(one)} is {with_article(group)}.",
                )
            )
            facts.append(
                Fact("category yes", "", (f"Is {one} {with_article(group)}?",), f"Yes, {one} is {with_article(group)}.")
            )
            other = tables.CATEGORIES[(index + len(group)) % len(tables.CATEGORIES)][0]
            if other != group:
                facts.append(
                    Fact(
                        "category no",
                        "",
                        (f"Is {one} {with_article(other)}?",),
                        f"No, {one} is {with_article(group)}.",
                    )
                )
        three = join_words([f"{with_article(member)}" for member in members[:3]])
        facts.append(
            Fact(
                "three of",
                plural,
                (
                    f"Name three {plural}.",
                    f"List three {plural}.",
                    f"Can you name three {plural}?",
                    f"Tell me three {plural}.",
                    f"Give me three {plural}.",
                ),
                f"Three {plural} are {three}.",
            )
        )
        facts.append(
            Fact(
                "one of",
                with_article(group),
                (f"Name {with_article(group)}.", f"Give me an example of {with_article(group)}."),
                f"{capitalized(with_article(members[0]))} is {with_article(group)}.",
            )
        )
    return facts


def _written() -> list[Fact]:
    facts = []
    for topic, rows in (("general", tables.GENERAL), ("engine", tables.ENGINE)):
        for questions, answers in rows:
            for answer in answers:
                facts.append(Fact(topic, "", tuple(questions), answer))
    for word, past in tables.PAST_TENSE:
        facts.append(
            Fact(
                "past tense",
                word,
                (f"What is the past tense of {word}?", f"What is the past of {word}?"),
                f"The past tense of {word} is {past}.",
            )
        )
    for word, plural in tables.PLURALS:
        facts.append(
            Fact(
                "plural",
                word,
                (f"What is the plural of {word}?", f"What do you call more than one {word}?"),
                f"The plural of {word} is {plural}.",
            )
        )
    for job, deed in tables.JOBS:
        one = with_article(job)
        facts.append(
            Fact("job", one, (f"What does {one} do?", f"What is the work of {one}?"), f"{capitalized(one)} {deed}.")
        )
    for deed, tool in tables.TOOLS:
        facts.append(
            Fact(
                "tool", "", (f"What do you use to {deed}?", f"What do I need to {deed}?"), f"You use {tool} to {deed}."
            )
        )
    return facts


@cache
def facts_by_topic() -> dict[str, tuple[Fact, ...]]:
    """Every fact of the corpus, grouped by topic, in a fixed order."""
    groups: dict[str, list[Fact]] = {}
    for build in (_capitals, _animals, _colours, _opposites, _cycles, _arithmetic, _numbers, _categories, _written):
        for fact in build():
            groups.setdefault(fact.topic, []).append(fact)
    return {topic: tuple(members) for topic, members in groups.items()}


# How often a topic is drawn, per hundred draws or so; what is not named gets `_DEFAULT_WEIGHT`.
_WEIGHTS = {
    "capital": 14.0,
    "capital of which": 4.0,
    "continent": 4.0,
    "language": 4.0,
    "animal sound": 5.0,
    "animal baby": 3.0,
    "colour": 5.0,
    "opposite": 6.0,
    "day after": 2.0,
    "day before": 2.0,
    "month after": 2.0,
    "month before": 2.0,
    "arithmetic plus": 14.0,
    "arithmetic minus": 10.0,
    "arithmetic times": 9.0,
    "category": 4.0,
    "category yes": 4.0,
    "category no": 4.0,
    "colour yes": 2.5,
    "colour no": 2.5,
    "general": 10.0,
    "engine": 14.0,
    "past tense": 2.0,
    "plural": 2.0,
    "job": 2.0,
    "tool": 2.0,
}
_DEFAULT_WEIGHT = 1.5


def draw_fact(rng: random.Random) -> Fact:
    """One fact, topic first, so that a large table does not crowd out a small one."""
    groups = facts_by_topic()
    topics = list(groups)
    topic = rng.choices(topics, weights=[_WEIGHTS.get(name, _DEFAULT_WEIGHT) for name in topics])[0]
    return rng.choice(groups[topic])


def draw_question(rng: random.Random, fact: Fact) -> str:
    """One of the fact's questions; now and then typed as hurried people type, in lower case or without the mark."""
    question = rng.choice(fact.questions)
    if rng.random() < 0.10:
        question = question.lower()
    if rng.random() < 0.10:
        question = question.rstrip("?.")
    if rng.random() < 0.08:
        question = (
            rng.choice(("Please tell me: ", "Hello! ", "Hi, ", "I have a question. ", "Quick question: ", "OK. "))
            + question
        )
    return question


def describe_country(rng: random.Random, name: str = "") -> str:
    """A short paragraph about one country, the named one if any."""
    rows = [row for row in tables.COUNTRIES if name in ("", row[0])]
    country, capital, continent, language = rng.choice(rows)
    named = capitalized(country)
    return rng.choice(
        (
            f"The capital of {country} is {capital}. {named} is in {continent}, and people there speak {language}.",
            f"{named} is a country in {continent}. Its capital is {capital}. People in {country} speak {language}.",
            f"{capital} is the capital of {country}. It is a city in {continent}. People there speak {language}.",
        )
    )


def describe_animal(rng: random.Random, name: str = "") -> str:
    """A short paragraph about one animal, the named one if any."""
    rows = [row for row in tables.ANIMALS if name in ("", row[0])]
    name, sound, baby, home, food, num_legs, skill = rng.choice(rows)
    sentences = [
        f"It lives {home}.",
        f"It eats {food}.",
        f"It has {num_legs} legs.",
        f"It can {skill}.",
        f"A baby {name} is called {with_article(baby)}.",
    ]
    if sound:
        sentences.append(f"It says {sound}.")
    rng.shuffle(sentences)
    return " ".join([f"{capitalized(with_article(name))} is an animal.", *sentences[: rng.randint(2, 5)]])
