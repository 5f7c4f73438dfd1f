"""Texts for which llama.cpp was measured. Whoever changes one measures again: see `measure.py`."""

from __future__ import annotations

HARD = "\n".join(
    [
        "  Hello  world, I've 'told HE'S THERE; it'll cost 1234567.89 or 3..3 ² ½ Ⅻ ٣٤٥",
        "\ttabs\t\tand \r\n line ends\n\n\n and     spaces   ",
        "🚀 😶\u200d🌫\ufe0f 👨\u200d👩\u200d👧 🇩🇪 e\u0301 cafe\u0301 ﬁ \u212b",
        "हिन्दी ไทย العربية עברית 한국어 ひらがな 我想在apple工作1314151天～ нещо",
        "def f(x):\n    return x**2  # https://example.com/a?b=c&d=%20#x",
        "\u00a0\u2003\u3000 x\u200bz \ufeff▁under▁score_ \x01\x7f\ufffd",
        "<table></table> <0x0A> <|im_start|>user\nhi<|im_end|> <start_of_turn>model<end_of_turn> <s></s> aaaaaaaaa",
    ]
)
"""White space, digits, scripts, emoji, code, and spellings of special tokens of several families."""

PASSAGE = """\
It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife.

However little known the feelings or views of such a man may be on his first entering a neighbourhood, this truth is \
so well fixed in the minds of the surrounding families, that he is considered as the rightful property of some one or \
other of their daughters.

"My dear Mr. Bennet," said his lady to him one day, "have you heard that Netherfield Park is let at last?"

Mr. Bennet replied that he had not.

"But it is," returned she; "for Mrs. Long has just been here, and she told me all about it."

Mr. Bennet made no answer.

"Do not you want to know who has taken it?" cried his wife impatiently.

"You want to tell me, and I have no objection to hearing it."

This was invitation enough.

"Why, my dear, you must know, Mrs. Long says that Netherfield is taken by a young man of large fortune from the north \
of England; that he came down on Monday in a chaise and four to see the place, and was so much delighted with it that \
he agreed with Mr. Morris immediately; that he is to take possession before Michaelmas, and some of his servants are \
to be in the house by the end of next week."

"What is his name?"

"Bingley."

"Is he married or single?"

"Oh! single, my dear, to be sure! A single man of large fortune; four or five thousand a year. What a fine thing for \
our girls!"

"How so? how can it affect them?"

"My dear Mr. Bennet," replied his wife, "how can you be so tiresome! You must know that I am thinking of his marrying \
one of them."

"Is that his design in settling here?"

"Design! nonsense, how can you talk so! But it is very likely that he may fall in love with one of them, and \
therefore you must visit him as soon as he comes."
"""
"""The opening of Jane Austen's Pride and Prejudice (1813), in the public domain."""
