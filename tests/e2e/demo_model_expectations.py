"""Expected greedy answers of the demo model, independent of the engine.

Each answer is the whole text up to the end-of-text token, or its beginning if it ends in an ellipsis.
"""

from __future__ import annotations

COMPLETIONS = {
    "The capital of France is": " Paris...",
    "The capital of Japan is": " Tokyo...",
    "The opposite of hot is": " cold.",
    "The day after Monday is": " Tuesday.",
    "7 plus 5 is": " 12.",
    "What does a cow say?": "A cow says moo.",
    "What colour is the sky?": "The sky is blue.",
    "Question: What is the capital of Italy?\nAnswer:": " The capital of Italy is Rome...",
    "Have you heard of paged attention?": "Yes...",
    "Once upon a time": ", ...",
}

# Conversations as (role, content) turns, and the reply.
SYSTEM = ("system", "You are a helpful assistant.")
REPLIES: dict[tuple[tuple[str, str], ...], str] = {
    (("user", "What is the capital of Italy?"),): "The capital of Italy is Rome.",
    (("user", "what is the capital of germany"),): "The capital of Germany is Berlin.",
    (("user", "What is 3 plus 4?"),): "3 plus 4 is 7.",
    (("user", "What is 6 times 7?"),): "6 times 7 is 42.",
    (("user", "What is the opposite of big?"),): "The opposite of big is small.",
    (("user", "Hello!"),): "Hello! How can I help you?",
    (SYSTEM, ("user", "What is the KV cache?")): "The KV cache keeps...",
    (
        SYSTEM,
        ("user", "What is the capital of Japan?"),
        ("assistant", "The capital of Japan is Tokyo."),
        ("user", "And Norway?"),
    ): "The capital of Norway is Oslo.",
    (
        ("user", "My name is Mia."),
        ("assistant", "Hello, Mia! How can I help you?"),
        ("user", "What does a dog say?"),
        ("assistant", "A dog says woof."),
        ("user", "What is my name?"),
    ): "Your name is Mia.",
}


def says(text: str, expected: str) -> bool:
    """Whether ``text`` equals the expected text; whitespace around it and the separator from the prompt are ignored."""
    if expected.endswith("..."):
        return text.strip().startswith(expected.removesuffix("...").strip())
    return text.strip() == expected.strip()


def messages(chat: tuple[tuple[str, str], ...]) -> list[dict[str, str]]:
    """The conversation in the format of chat templates."""
    return [{"role": role, "content": content} for role, content in chat]
