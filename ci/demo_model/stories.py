"""Generator of small stories: characters, an object, a place, and one of a dozen plots.

The cast is drawn once per story and every sentence refers to it through slots, so a fox named Nia stays a fox named
Nia from the first line to the last, and the red kite that was lost is the red kite that is found.
"""

# ruff: noqa: E501

from __future__ import annotations

import random
from dataclasses import dataclass
from zlib import crc32

from ci.demo_model.grammar import capitalized, expand, invented_name, with_article

GIRL_NAMES = (
    "Mia", "Lily", "Anna", "Emma", "Nora", "Zoe", "Lucy", "Ella", "Ruby", "Clara", "Ida", "Rosa", "Nia", "Maya", "Lena", "Sara",
    "Eva", "Julia", "Alice", "Holly", "Daisy", "Grace", "Amy", "Lola", "Tess",
)  # fmt: skip
BOY_NAMES = (
    "Tom", "Ben", "Max", "Leo", "Sam", "Finn", "Noah", "Oscar", "Hugo", "Paul", "Jack", "Theo", "Adam", "Felix", "Milo", "Jonas",
    "Peter", "Luke", "Emil", "Henry", "Otto", "Toby", "Nick", "Oliver", "David",
)  # fmt: skip
KINDS = (
    "girl", "boy", "fox", "rabbit", "bear", "mouse", "cat", "dog", "owl", "duck", "frog", "turtle", "hedgehog", "squirrel",
    "robot", "dragon", "elephant", "lion", "penguin", "goat",
)  # fmt: skip
TRAITS = ("little", "small", "young", "kind", "curious", "brave", "cheerful", "shy", "clever", "gentle")
_COLOURS = ("red", "blue", "green", "yellow", "white", "golden", "purple", "brown", "silver", "orange")
_TOYS = (
    "ball",
    "kite",
    "hat",
    "book",
    "drum",
    "scarf",
    "lantern",
    "cup",
    "bell",
    "boat",
    "key",
    "whistle",
    "umbrella",
    "ring",
)
_FOODS = (
    "apple",
    "loaf of bread",
    "piece of cake",
    "pear",
    "bowl of soup",
    "basket of berries",
    "jar of honey",
    "bag of nuts",
)
_PLACES = ("forest", "garden", "village", "meadow", "park", "valley", "market", "harbour")
_FAR_PLACES = ("lake", "old mill", "river", "hill", "beach", "castle", "bridge", "waterfall")
_HIDING_PLACES = (
    "under a bush",
    "behind a big stone",
    "in the tall grass",
    "under the old bench",
    "next to the well",
    "behind the door",
)


@dataclass(frozen=True)
class Cast:
    """Who and what a story is about. ``kind`` is the hero's, ``friend_kind`` the friend's."""

    name: str
    kind: str
    she: str
    friend: str
    friend_kind: str
    friend_she: str
    colour: str
    toy: str
    food: str
    place: str
    far_place: str

    def slots(self) -> dict[str, str]:
        """Everything a plot may name in braces."""
        her, him = ("her", "her") if self.she == "she" else ("his", "him")
        friend_her, friend_him = ("her", "her") if self.friend_she == "she" else ("his", "him")
        return {
            "name": self.name, "kind": self.kind, "she": self.she, "She": capitalized(self.she), "her": her, "Her": capitalized(her), "him": him,
            "friend": self.friend, "fkind": self.friend_kind, "fshe": self.friend_she, "fShe": capitalized(self.friend_she),
            "fher": friend_her, "fhim": friend_him, "colour": self.colour, "toy": self.toy, "food": self.food,
            "a_food": with_article(self.food), "a_toy": with_article(f"{self.colour} {self.toy}"),
            "place": self.place, "far": self.far_place,
        }  # fmt: skip


def draw_cast(rng: random.Random, kind: str = "", name: str = "") -> Cast:
    """A hero and a friend with different names; ``kind`` and ``name`` fix the hero's."""
    kind = kind or rng.choice(KINDS)
    she = "she" if kind == "girl" or (kind != "boy" and rng.random() < 0.5) else "he"
    if name in GIRL_NAMES or name in BOY_NAMES:
        she = "she" if name in GIRL_NAMES else "he"
    elif not name and rng.random() < 0.15:
        name = invented_name(rng)
    elif not name:
        name = rng.choice(GIRL_NAMES if she == "she" else BOY_NAMES)
    friend_kind = rng.choice([other for other in KINDS if other != kind])
    friend_she = "she" if friend_kind == "girl" or (friend_kind != "boy" and rng.random() < 0.5) else "he"
    friend = rng.choice([other for other in (GIRL_NAMES if friend_she == "she" else BOY_NAMES) if other != name])
    return Cast(
        name, kind, she, friend, friend_kind, friend_she,
        rng.choice(_COLOURS), rng.choice(_TOYS), rng.choice(_FOODS), rng.choice(_PLACES), rng.choice(_FAR_PLACES),
    )  # fmt: skip


_OPENINGS = (
    "[One|On a] [sunny|warm|windy|cold] [day|morning], {a_trait_kind} named {name} was walking through the {place}.",
    "There once was {a_trait_kind} named {name} who lived in the {place}.",
    "[Once upon a time,|Once upon a time,|Once upon a time,|Long ago,|Once,] there [was|lived] {a_trait_kind} named {name}. {She} lived [in|near] the {place}.",
    "[Once upon a time,|Long ago,] in a quiet {place}, there lived {a_trait_kind} named {name}.",
    "{name} was {a_trait_kind} who lived [in|near] the {place}.",
    "The [little|small|young] {kind} was [called|named] {name}, and {she} lived [in|near] the {place}.",
    "In the {place} lived {a_trait_kind}. {Her} name was {name}.",
)

_LOST = (
    "{name} had {a_toy}, and {she} loved it [very much|more than anything else]. "
    "[One day|One morning], {she} took the {toy} to the {far}. On the way home, {name} saw that the {toy} was gone. "
    '["Oh no, where is my {toy}?" cried {name}.|"I have lost my {toy}," said {name}, and {she} began to cry.] '
    '{friend} the {fkind} [heard {him} and came to help|came along the path]. "Do not be sad," said {friend}. "We will look for it together." '
    "They looked [near the {far}|along the path] and they looked [under the trees|in the water], but they did not see it. "
    "At last {friend} looked {hiding}. There was the {colour} {toy}! "
    '"Thank you, {friend}," said {name}. [From that day on, the two were best friends.|{She} was so happy that {she} danced all the way home.]'
)
_SHARE = (
    "[One day|One afternoon], {name} had {a_food} for lunch. {She} sat down [under a tree|near the {far}] to eat it. "
    "Then {friend} the {fkind} came by. {fShe} looked [tired and hungry|hungry and a little sad]. "
    '"I have not eaten [today|since yesterday]," said {friend}. {name} thought for a moment. {She} was hungry too. '
    '"[Let us share|I will share] the {food}," said {name}. They sat together and ate, and it tasted [better than ever|wonderful]. '
    "[The next day, {friend} brought {a_toy} as a gift.|The next day, {friend} came back with a basket full of berries for {name}.] "
    "{name} learned that [sharing makes friends|food tastes better when you share it]."
)
_BRAVE = (
    "{name} was afraid of [the dark|the deep water|loud thunder|high places]. "
    "When the others went to the {far}, {she} always stayed at home. "
    "[One evening|One day], {friend} the {fkind} [did not come home|got lost near the {far}]. {name} was scared, but {she} thought of {her} friend. "
    '{She} took {a_toy} with {him} and went out, step by step. "{friend}, where are you?" called {name}. '
    '"I am here!" cried {friend}. {fShe} was sitting {hiding}. {name} took {friend} by the hand and they walked home together. '
    '"You are very brave," said {friend}. {name} smiled. ["I was afraid," {she} said, "but I went anyway."|{She} was not afraid any more.]'
)
_SEED = (
    '[One day|In spring], {name} found a small [brown|black] seed {hiding}. "What will it be?" {she} asked. '
    '{friend} the {fkind} said, "Put it in the soil and give it water. Then you must wait." '
    "{name} planted the seed in the garden. Every morning {she} gave it water, and every evening {she} looked at it. "
    '[For many days|For a week] nothing happened, and {name} was sad. "Be patient," said {friend}. '
    "Then, one sunny morning, there was a small green leaf. It grew and grew, until there was a big {colour} flower. "
    '"It is beautiful," said {name}. {She} learned that [good things take time|it is good to be patient].'
)
_BUILD = (
    "[One day|One morning], {name} wanted to build a [little house|boat|bridge|tower]. {She} found some wood and some rope and began to work. "
    "But in the afternoon a strong wind came, and everything fell down. {name} sat down and [sighed|cried a little]. "
    '{friend} the {fkind} came by. "What happened?" asked {friend}. "The wind broke it," said {name}. "I cannot do it." '
    '"Try again," said {friend}, "and I will help you." They worked together [all day|until the evening]. {friend} held the wood, and {name} tied the rope. '
    "This time it was strong, and the wind could not break it. They [painted it {colour}|put a {colour} flag on top] and were very proud. "
    "{name} learned that [you should never give up|two can do more than one]."
)
_RAIN = (
    "[One day|On Sunday], {name} and {friend} the {fkind} wanted to go to the {far}. {name} packed {a_food}, and {friend} brought {a_toy}. "
    'But then dark clouds came, and it began to rain. "Now our day is spoiled," said {friend}. '
    '"No," said {name}, "we can have fun at home." They [told stories|sang songs], they played with the {toy}, and they ate the {food}. '
    "When they looked out of the window, the rain had stopped, and there was a big rainbow over the {far}. "
    '"What a lovely day," said {friend}. {name} [laughed|nodded]. [Even a rainy day can be a good day.|They would never forget it.]'
)
_RACE = (
    "[One day|In summer], there was a race from the {place} to the {far}. {name} wanted to win {a_toy}, which was the prize. "
    '{friend} the {fkind} wanted to win it too. "Ready, set, go!" called the old owl, and they ran. '
    "{name} was in front. But then {she} heard a cry. {friend} had fallen over a stone. {name} stopped and went back. "
    '"Are you hurt?" asked {name}. "Only a little," said {friend}. {name} helped {fhim} up, and they walked to the end together. '
    "They came in last, but everyone clapped. The old owl gave the {colour} {toy} to both of them. "
    '"Being kind is better than being first," said {name}.'
)
_GIFT = (
    "[Tomorrow was|It was almost] the birthday of {friend} the {fkind}, and {name} had no gift. {She} had no money to buy one. "
    "{name} thought about it [all day|for a long time]. Then {she} had an idea. {She} [took some paper and paint|found some wood and some paint] and made {a_toy}. "
    "{She} worked until the moon was in the sky. The next day, {name} went to the party. {She} was a little [shy|worried]. "
    '{friend} opened the gift and smiled. "Did you make this {toy} yourself?" asked {friend}. "Yes," said {name}. '
    '"Then it is the best gift of all," said {friend}. They ate {a_food} and danced until the evening.'
)
_RESCUE = (
    '[One day|One cold morning], {name} was walking near the {far} when {she} heard a small voice. "Help! Help!" it said. '
    'It was {friend} the {fkind}, who was stuck {hiding}. "Do not worry," said {name}. {She} pulled and pulled, until {friend} was free. '
    '"Thank you," said {friend}. "One day I will help you too." {name} [smiled and went on|waved and went home]. '
    "In winter, {name} lost {her} way in the snow. {She} was cold and tired. Then {she} saw a light. It was {friend} with a {colour} lantern! "
    '"Come with me," said {friend}. They went home and drank hot tea. {name} learned that [kindness always comes back|a good deed is never lost].'
)
_SLEEP = (
    "[One night|One evening], {name} could not sleep. The moon was bright, and the wind was singing in the trees. "
    '{She} got up and looked out of the window. {friend} the {fkind} was awake too. "Why are you awake?" asked {friend}. '
    '"I am thinking of too many things," said {name}. "Then let us count the stars," said {friend}. '
    '"One, two, three, four, five," they counted. There were so many stars over the {far} that they soon grew tired. '
    "{name} [closed {her} eyes|went back to bed], held {her} {colour} {toy}, and dreamed of [the sea|a ship among the stars|a garden full of flowers] until the morning."
)
_NEWCOMER = (
    "[One day|One morning], {friend} the {fkind} came to the {place}. {fShe} was new there and did not know anyone. "
    "{friend} sat alone [near the {far}|under a tree] and looked sad. {name} saw {fhim} and walked over. "
    '"Hello, I am {name}," said {name}. "Would you like to play?" {friend} [nodded slowly|looked up and smiled]. "I am {friend}," {fshe} said. '
    "{name} brought {her} {colour} {toy}, and they played until the sun went down. "
    '"Will you come back tomorrow?" asked {friend}. "Of course," said {name}. [From then on, {friend} was never alone.|And that is how the two became friends.]'
)
_MAP = (
    "[One day|One rainy day], {name} found an old map {hiding}. It showed the way to a treasure near the {far}. "
    '{She} ran to {friend} the {fkind}. "Look, a map!" said {name}. "Let us find the treasure," said {friend}. '
    "They crossed a stream, they climbed over a wall, and they came to a tall tree. There they dug a hole. "
    "Soon they found {a_chest} chest. There was no gold in it, only [old books|letters and pictures]. {friend} was [a little sad|surprised], but {name} began to read. "
    "The stories were [full of wonder|funny and beautiful], and they read them together every evening. "
    '"This is the best treasure," said {name}, and {friend} agreed.'
)

PLOTS: dict[str, str] = {
    "a lost {toy}": _LOST,
    "sharing": _SHARE,
    "being brave": _BRAVE,
    "a seed": _SEED,
    "building something": _BUILD,
    "a rainy day": _RAIN,
    "a race": _RACE,
    "a birthday": _GIFT,
    "kindness": _RESCUE,
    "the night": _SLEEP,
    "a new friend": _NEWCOMER,
    "a treasure": _MAP,
}

_ENDINGS = ("", "", "", " The end.")


def is_reserved(name: str, plot: str) -> bool:
    """Whether heroes of this name never live through this plot in training, only in the held-out text.

    About one pair in sixteen; a checksum decides, so that the split needs no list and never moves.
    """
    return crc32(f"{name}/{plot}".encode()) % 16 == 0


def tell_plot(rng: random.Random, plot: str, cast: Cast) -> str:
    """The body of a story, without its opening."""
    slots = cast.slots() | {
        "hiding": rng.choice(_HIDING_PLACES),
        "a_chest": with_article(rng.choice(("small", "wooden", "old"))),
    }
    return expand(rng, PLOTS[plot], **slots)


def tell_story(rng: random.Random, cast: Cast, plot: str, trait: str = "") -> str:
    """A whole story; ``trait`` fixes what the hero is like."""
    opening = expand(
        rng,
        rng.choice(_OPENINGS),
        a_trait_kind=with_article(f"{trait or rng.choice(TRAITS)} {cast.kind}"),
        **cast.slots(),
    )
    return f"{opening} {tell_plot(rng, plot, cast)}{rng.choice(_ENDINGS)}"


def draw_plot(rng: random.Random, name: str, held_out: bool) -> str:
    """A plot for this hero: one of the reserved ones if ``held_out`` (any if there is none), else one of the others."""
    plots = [plot for plot in PLOTS if is_reserved(name, plot) == held_out]
    return rng.choice(plots or list(PLOTS))


def draw_story(rng: random.Random, held_out: bool = False) -> str:
    """A random story; one in five goes on with a second chapter for the same hero."""
    cast = draw_cast(rng)
    plot = draw_plot(rng, cast.name, held_out)
    story = tell_story(rng, cast, plot)
    if rng.random() < 0.2:
        sequel_cast = draw_cast(rng, cast.kind, cast.name)
        sequel_plot = draw_plot(rng, cast.name, held_out)
        story = f"{story.removesuffix(' The end.')}\n\n{tell_plot(rng, sequel_plot, sequel_cast)}"
    return story
