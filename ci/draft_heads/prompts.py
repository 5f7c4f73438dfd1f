"""Prompts for a small assistant, all written for this project: every pair of a request and a topic, in random order."""

from __future__ import annotations

import random
from collections.abc import Iterator

SEED = 47
"""Of the order of prompts."""
HELD_OUT = 20
"""One prompt in so many, in that order, is not trained on."""
REQUESTS = (
    "Explain {topic} to a child.",
    "Write a short story about {topic}.",
    "What are the advantages and disadvantages of {topic}?",
    "Give me five tips about {topic}.",
    "Write a poem about {topic}.",
    "What should a beginner know about {topic}?",
    "Describe {topic} in three sentences.",
    "List ten words that have to do with {topic}.",
    "Write an email to a friend about {topic}.",
    "How has {topic} changed in the last hundred years?",
    "Why do people care about {topic}?",
    "Write a dialogue between two people who disagree about {topic}.",
    "Summarize what is known about {topic}.",
    "What are common mistakes with {topic}?",
    "Write a lesson plan about {topic} for one hour.",
    "Compare {topic} with something similar.",
    "Ask me three questions about {topic}, and answer them.",
    "Write the introduction of an essay about {topic}.",
    "Make a table with facts about {topic}.",
    "Write a Python function that has to do with {topic}, with comments.",
    "What would a world without {topic} look like?",
    "Give a definition of {topic} and an example.",
    "Write an advertisement for {topic}.",
    "Tell me a joke about {topic}.",
    "Which books or films are about {topic}?",
)
TOPICS = (
    *(
        "bread",
        "the moon",
        "bicycles",
        "chess",
        "rivers",
        "democracy",
        "sleep",
        "volcanoes",
        "gardening",
        "electricity",
    ),
    *("friendship", "trains", "photosynthesis", "money", "the sea", "music", "mountains", "cooking with vegetables"),
    *("public libraries", "recycling", "dinosaurs", "the human heart", "computers", "coffee", "bees", "languages"),
    *("football", "the Roman Empire", "painting", "bridges", "vaccines", "mathematics", "dreams", "climate", "cats"),
    *("space travel", "insurance", "clocks", "family recipes", "lighthouses", "glass", "forests", "sorting numbers"),
    *("prime numbers", "passwords", "text files", "calendars", "maps", "the water cycle", "hospitals", "running"),
    *("tea", "the printing press", "robots", "snow", "markets", "castles", "medicine", "batteries", "dictionaries"),
    *("theatre", "wool", "deserts", "elections", "neighbours", "birthdays", "airports", "wheat", "earthquakes"),
    *("telescopes", "the alphabet", "rain", "ships", "honey"),
)


def prompts(rng: random.Random) -> Iterator[str]:
    """All prompts, each once."""
    pairs = [(request, topic) for request in REQUESTS for topic in TOPICS]
    rng.shuffle(pairs)
    for request, topic in pairs:
        yield request.format(topic=topic)
