"""The words of the reader's sentences: names, kinds, relations, properties. Pure Python."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

from dsd_ros.robot.sim.world import COLOURS, KINDS


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


OTHER_KINDS = ("table", "lamp", "bag", "basket", "cup", "book", "shelf", "plant", "toy", "cart")
_PLURALS = {"box": "boxes", "shelf": "shelves"}
PEOPLE = (
    "daughter", "son", "mother", "father", "wife", "husband", "sister", "brother", "neighbour",
    "friend", "grandmother", "guest", "boss",
)  # fmt: skip
# What I do, what she does, and the word behind "do", "does" or "did".
VERBS = (
    ("like", "likes", "like"),
    ("love", "loves", "love"),
    ("use", "uses", "use"),
    ("need", "needs", "need"),
    ("want", "wants", "want"),
    ("hate", "hates", "hate"),
    ("hid", "hid", "hide"),
    ("bought", "bought", "buy"),
    ("made", "made", "make"),
    ("painted", "painted", "paint"),
    ("lost", "lost", "lose"),
    ("found", "found", "find"),
    ("repaired", "repaired", "repair"),
    ("broke", "broke", "break"),
    ("borrowed", "borrowed", "borrow"),
)
TRAITS = (
    "may get wet", "is fragile", "is broken", "is new", "is heavy", "is empty", "is for guests",
    "must stay dry", "belongs to the hotel",
)  # fmt: skip
PLACES = (
    "in the kitchen", "in the hall", "in the garden", "in the cellar", "in the bedroom",
    "by the window", "by the stairs", "behind the door", "under the table", "near the sofa",
    "on the balcony", "beside the shelf",
)  # fmt: skip
MATERIALS = (
    "wood", "oak", "steel", "plastic", "glass", "cotton", "leather", "paper", "bamboo", "rubber",
    "stone", "wool",
)  # fmt: skip
CARES = ("may get wet", "must stay dry")
_NAMES = _words(
    "Viola Bruno Lotte Moro Tilda Fermo Sanka Oskar Ingrid Malva Borneo Kalle Sultan Nils Ronja "
    "Alma Benno Carla Dorian Edda Fabio Greta Hanno Isolde Jonas Kira Leander Mirka Nora Orlando "
    "Petra Quirin Rosa Stellan Tobias Ulla Vito Wanda Xaver Yara Zeno Arvid Bella Cosmo Dunja Elmo "
    "Flora Gustav Hilma Ivo Janna Konrad Lumi Mattis Nelly Olaf Paula Ragna Silas Thea Urban Vera "
    "Wilma Yorick Zita Aron Britta Clemens Dina Emil Frida Gero Helga Igor Juna Knut Lena Magnus "
    "Nika Otto Pirmin Runa Sven Tamara Ugo Valda Willow Zara Amadeo Birk Celeste Diego Estelle "
    "Finja Gordon Hedda Ilona Jasper Karma Lorenzo Marlo Noemi Orion Pablo Rufus Selma Tiago Umbra"
)
_ONSETS = _words("b bl br c ch d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sch sk sl st t tr v w z")
_VOWELS = _words("a e i o u a e i o a e ei au ie oo ya")
_CODAS = _words("n r l s m t x nd rk lt sk")


# How things are asked and said, behind the bare words.
BRING = (
    "bring me to the {}", "bring me to the {}", "go to the {}", "go to the {}", "take me to the {}",
    "lead me to the {}", "walk to the {}", "find the {}", "find me the {}", "look for the {}",
    "show me the {}", "get to the {}", "I want to go to the {}", "go and find the {}",
    "walk me to the {}", "guide me to the {}", "search for the {}",
)  # fmt: skip
WHICH = ("what is the name of the {}", "which one is the {}", "what is the {} called", "name the {}")
ASKED = {
    "colour": ("what colour is the {}", "which colour does the {} have", "what is the colour of the {}"),
    "place": ("where is the {}", "where does the {} stand", "where can I find the {}"),
    "material": ("what is the {} made of", "of what is the {} made", "which material is the {} made of"),
    "care": ("may the {} get wet", "can the {} get wet", "may I wet the {}"),
}  # fmt: skip
OTHER = (
    "how old is the {}", "who won the match", "what time is it", "tell me a joke", "how are you",
    "who built the {}", "what does the {} cost", "when does the train leave", "how tall is the {}",
    "what is the weather like", "why is the {} here", "how many doors are there", "who is your maker",
    "what is the capital of France", "when did my {} arrive", "how heavy is the {}",
)  # fmt: skip
WHO = (  # {one}, {many}: the kind; {does}: "my daughter hid"; {name}
    "The {one} {does} is the {name}.", "The {one} {does} is the {name}.",
    "The {one} that {does} is the {name}.", "The {one} that {does} is the {name}.",
    "The {one} {does} is called {name}.", "The {one} that {does} is called {name}.",
    "The {name} is the {one} {does}.", "The {name} is the {one} that {does}.",
    "Of all {many} {does} the {name}.", "Among the {many}, {does} the {name}.",
    "{Does} the {name} {one}.", "{Does} the {one} called {name}.",
)  # fmt: skip
WHO_TRAIT = (
    "The {one} that {does} is the {name}.", "The {one} that {does} is called {name}.",
    "The {name} {one} {does}.", "The {name} {one} {does}.", "The {one} called {name} {does}.",
    "The {name} is the {one} that {does}.", "Of all {many}, the {name} {does}.",
)  # fmt: skip
WHAT = {
    "colour": (
        "The {name} {one} is {value}.", "The {name} {one} is {value}.", "The {name} is {value}.",
        "The {name} is a {value} {one}.", "The colour of the {name} {one} is {value}.",
        "The {one} called {name} is {value}.", "The {name} {one} comes in {value}.",
        "{Value} is the colour of the {name} {one}.", "The {name} {one} was painted {value}.",
    ),
    "place": (
        "The {name} {one} stands {value}.", "The {name} {one} is {value}.", "The {name} stands {value}.",
        "The {name} is {value}.", "You find the {name} {one} {value}.",
        "The {one} called {name} stands {value}.",
    ),
    "material": (
        "The {name} {one} is made of {value}.", "The {name} is made of {value}.",
        "The {name} is a {one} of {value}.", "The {name} is a {value} {one}.",
        "The {one} called {name} is made of {value}.", "{Value} is what the {name} {one} is made of.",
    ),
    "care": (
        "The {name} {one} {value}.", "The {name} {one} {value}.", "The {name} {value}.",
        "The {one} called {name} {value}.",
    ),
}  # fmt: skip
FILLERS = (  # sentences about nothing that is asked
    "Breakfast is at eight.", "The shop opens at nine.", "Please do not feed the cat.",
    "The robot charges at night.", "Guests leave their shoes at the door.", "It often rains here.",
    "The lift is out of order.", "My daughter comes home at four.", "The heating is on in winter.",
    "Nobody is at home on Monday.", "The dog sleeps most of the day.", "All doors are closed at ten.",
    "The neighbour plays the piano.", "Tea is served at five.", "The key is with the boss.",
    "We moved in last year.", "The catalogue was printed in spring.", "Prices may change.",
    "Keep the floor clean.", "The manual lies on the desk.",
)  # fmt: skip
DRY = ("must not get wet", "may not get wet")  # other words for "must stay dry"


@dataclass(frozen=True)
class Relation:
    """What ties a thing to its name: a person's doing, or a trait. ``person`` is "" for the owner."""

    person: str = ""
    verb: int = -1  # row of VERBS; -1: a trait
    trait: str = ""

    def asked(self) -> str:
        """As the owner says it behind the kind: "I like", "my daughter hid", "that is fragile"."""
        if self.trait:
            return f"that {self.trait}"
        if self.person:
            return f"my {self.person} {VERBS[self.verb][1]}"
        return f"I {VERBS[self.verb][0]}"

    def answered(self) -> str:
        """As the reader says it back: "you like", "your daughter hid", "that is fragile"."""
        if self.trait:
            return f"that {self.trait}"
        if self.person:
            return f"your {self.person} {VERBS[self.verb][1]}"
        return f"you {VERBS[self.verb][0]}"


def relations(held_out: bool) -> tuple[Relation, ...]:
    """Every relation of the training, or those kept for validation: combinations of known words."""
    found = [Relation(trait=trait) for trait in TRAITS]
    for verb in range(len(VERBS)):
        found += [Relation(person, verb) for person in ("", *PEOPLE)]
    return tuple(r for r in found if _kept(r) == held_out)


def goals(held_out: bool) -> tuple[tuple[str, str], ...]:
    """(colour, kind) combinations of the training, or the five kept for validation."""
    every = [(colour, kind) for colour in COLOURS for kind in KINDS]
    return tuple(goal for goal in every if (every.index(goal) % 8 == 3) == held_out)


def plural(kind: str) -> str:
    return _PLURALS.get(kind, f"{kind}s")


def draw_name(rng: random.Random, held_out: bool, like: str = "") -> str:
    """A name: a real one or made of syllables; ``like``: one that begins as that one does.

    About one name in eight is held out by its letters: the training never sees it.
    """
    while True:
        if like:
            name = like[: rng.randint(1, 3)] + draw_name(rng, held_out)[rng.randint(1, 2) :]
        elif rng.random() < 0.12:
            name = rng.choice(_NAMES)
        else:
            name = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.choice((1, 2, 2, 2, 3))))
            name = (name + rng.choice(_CODAS) * (rng.random() < 0.4)).capitalize()
        if 3 <= len(name) <= 9 and (zlib.crc32(name.encode()) % 8 == 0) == held_out:
            return name


def _kept(relation: Relation) -> bool:
    """One combination of person and verb in nine; the owner's likes and loves are always trained."""
    if relation.trait or (not relation.person and relation.verb < 2):
        return False
    people = ("", *PEOPLE)
    return (people.index(relation.person) * 4 + relation.verb * 5) % 9 == 0
