"""The parts of each split's instructions: requests, names, openings and so on.

Training has far more than the others. Many of its parts use "right", "left", "closer" and the like where they tell no
side and no distance ("right away", "what is left is to reach"): such a word alone is no reason to take another goal.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsd_lab.worlds.situations import Split

FIND = "find"  # the intent that asks for the only thing of its name


@dataclass(frozen=True)
class Wording:
    """The parts of a split's templates. "{}" is the thing's name, "{s}" its plural."""

    requests: tuple[str, ...]  # before the thing, may be followed by a tail
    wishes: tuple[str, ...]  # before the thing, with nothing behind it
    tails: tuple[str, ...]
    whole: dict[str, tuple[str, ...]]  # templates of their own, by intent
    names: dict[str, tuple[str, ...]]  # by intent
    openings: tuple[str, ...]
    endings: tuple[str, ...]


def _sides(*templates: str) -> dict[str, tuple[str, ...]]:
    return {side: tuple(t.replace("SIDE", side) for t in templates) for side in ("left", "right")}


def _distances(*templates: str) -> dict[str, tuple[str, ...]]:
    """Names by distance: MORE is a comparative, MOST a superlative, FROM what goes with it."""
    words = {
        "nearer": ("to", ("nearer", "closer"), ("nearest", "closest")),
        "farther": ("from", ("farther", "further"), ("farthest", "furthest")),
    }
    return {
        intent: tuple(
            template.replace("MORE", more).replace("MOST", most).replace("FROM", where)
            for template in templates
            for more, most in zip(mores, mosts, strict=True)
        )
        for intent, (where, mores, mosts) in words.items()
    }


WORDINGS: dict[Split, Wording] = {
    Split.TRAINING: Wording(
        requests=(
            "find", "go to", "go find", "go and find", "go over to", "go up to", "walk to", "walk over to",
            "walk up to", "walk towards", "move to", "move over to", "move towards", "head to", "head for",
            "head over to", "look for", "look around for", "search for", "search the room for", "approach",
            "reach", "get to", "get close to", "navigate to", "run to", "run over to", "come to", "drive to",
            "drive up to", "step up to", "bring yourself to", "try to find", "try to reach", "turn to",
            "be at", "get over to", "go straight to", "take a walk to", "have a look for", "point yourself at",
            "see if you can find", "see whether you find", "you must go to", "you have to find", "you are to reach",
            "do not stop before you reach", "keep going until you are at", "it is time to go to", "make for",
            "go right up to", "walk right up to", "go right over to", "get right next to", "stand right at",
            "move closer to", "come closer to", "get nearer to", "go further on to", "walk farther until you reach",
            "come near", "stay near", "keep close to", "get as close as you can to", "go as near as you can to",
            "look left and right for", "search left and right for", "search near and far for",
        ),
        wishes=(
            "find me", "stop at", "stop in front of", "stand by", "stand next to", "wait at", "show me",
            "take me to", "lead me to", "I want", "I need", "your goal is", "the goal is", "where is",
            "can you see", "do you see", "is there", "tell me if you see", "I am looking for", "how about",
            "do we have", "let me see", "I think I saw", "nobody has found", "your next stop is", "you belong at",
            "your place is at", "you are needed at", "they wait for you at", "what you look for is",
            "I left my keys at", "my friend left his bag by", "all that is left is to reach", "what is left is",
            "one thing is left to find,", "the right thing to look for is", "the right place to be is",
            "not far from here is", "close to here is", "near you there must be", "further on there should be",
            "as far as I know there is",
        ),
        tails=(
            "", "", "", "", " and stop there", " and wait there", " in this room", " for me", " and stay",
            " and look at it", " and then stop", " and let me know", " and tell me what you see", " by yourself",
            " and do nothing else", " if you can", " if you see it", " when you are ready", " as you did before",
            " from here", " from where you are", " the way you like", " so that you stand in front of it",
            " and stay right there", " and wait right by it", " while there is time left",
            " with what is left of the battery", " and go no further", " and come no closer than you must",
            " and stay close to it", " and keep near it", " as near as you can get", " however far it is",
            " even if it is far away",
        ),
        whole={
            FIND: (
                "{}", "the {}", "there is a {} here, find it", "a {}, find it", "you see the {}? go there",
                "the {} and nothing else", "see that you find the {}", "if there is a {}, stand by it",
                "the {} is what I want", "the {} is not far, go there", "the {} is near, so go right up to it",
                "the {} is where you should be", "you left the {} behind, go back to it",
                "we left a {} in here, find it",
                "now that he left the {}, go there", "what about that one thing, a {}",
            ),
            **_sides(
                "the SIDE {}, go there", "the SIDE {} is what I want", "you see the SIDE {}? go there",
                "there are two {s}, go to the SIDE one", "of both {s} I want the SIDE one",
                "two {s}, find the SIDE one",
                "of the {s} find the one on the SIDE", "on the SIDE there is a {}, go to it",
                "two {s}, I mean the SIDE one",
                "on your SIDE is a {}, go there", "both {s} are here, SIDE one please",
                "the {}, the one on the SIDE, go there",
                "{}, SIDE one", "SIDEmost {} first",
            ),
            **_distances(
                "the MORE {}, go there", "the MORE {} is what I want", "you see the MORE {}? go there",
                "there are two {s}, go to the MORE one", "of both {s} I want the MOST one",
                "two {s}, find the MORE one",
                "of the {s} find the one that is MOST", "two {s}, I mean the MORE one", "choose the MOST of the {s}",
                "both {s} are here, MOST one please", "the {}, the MORE one, go there", "{}, MORE one", "MORE {} first",
            ),
        },
        names={
            FIND: ("the {}", "the {}", "the {}", "a {}", "a {}", "my {}", "this {}", "the only {}", "the {} here",
                   "the {} over there", "the {} in here"),
            **_sides(
                *3 * (
                    "the SIDE {}", "the SIDE-hand {}", "the SIDE one of the two {s}", "the SIDE one of both {s}",
                    "the SIDEmost {} here", "the SIDEmost of the two {s}", "the SIDEmost of both {s}",
                    "the {} that is SIDEmost", "the {} that is SIDEmost of the two", "my SIDE {}",
                    "the SIDE {} of the pair", "SIDE {}", "SIDE one of the two {s}", "the {}, the SIDE one",
                    "whichever {} is on the SIDE", "that {} on the SIDE", "a {} that is on the SIDE",
                ),
                *(
                    f"the {{}} {link} SIDE{end}"
                    for link in ("on the", "on your", "that is on the", "that is on your", "over on the", "at the",
                                 "that you see on the", "I see on my", "standing on the", "that sits on the")
                    for end in ("", "", " side", " of the two", " hand side")
                ),
            ),
            **_distances(
                *3 * (
                    "the MORE {}", "the MOST {} here", "the MOST one of both {s}", "the MORE one of the two {s}",
                    "the MORE one of both {s}", "the MOST of both {s}", "the MOST of the two {s}",
                    "the MORE {} of the pair", "the {} MOST FROM you", "MORE {}", "MOST of both {s}",
                    "the {}, the MORE one",
                    "whichever {} is MORE", "whichever {} is MOST", "that {} MOST FROM you", "a {} that is MORE",
                ),
                *(
                    f"the {{}} {link} {more}{end}"
                    for link in ("that is", "that stands", "that sits", "that you find", "placed", "standing",
                                 "over there")
                    for more, ends in (
                        ("MORE", ("", "", " than the other", " of the two", " by", " FROM where you are")),
                        ("MOST", ("", "", " of the two", " FROM you", " FROM the robot", " FROM where you are")),
                    )
                    for end in ends
                ),
                "the {} MOST FROM where you are", "the {} MORE FROM you",
            ),
        },
        openings=(
            "please ", "now ", "robot, ", "could you ", "can you ", "then ", "Go2, ", "right, ", "all right, ",
            "please, ", "well, ", "so, ", "listen, ", "next, ", "first, ", "after that ", "go on, ", "come on, ",
            "take your time, ", "I need you to ", "I want you to ", "you have to ", "you may ", "you can ",
            "be so good and ", "my friend, ", "you there, ", "you, ", "if you like, ", "when you can, ",
            "as I told you, ", "once more, ", "one more thing, ", "task: ", "goal: ", "your next task: ",
            "right then, ", "that is right, ", "you were right, ", "if I am right, ", "to be right on time, ",
            "there is little time left, ", "we have a minute left, ", "the others have left, ", "nobody is left, ",
            "it is not far, ", "it is near, ", "stay close and ", "come a little closer and ",
            "before we go any further, ", "further to that, ", "nearly there, ",
        ),
        endings=(
            ".", "!", ", please", " right away", " right this minute", " straight away", " in the time left",
            "?", " please", " today", " again", " once more", " this time", " for me", " if you can", " with me",
            ", can you", ", could you", ", you know", ", do you hear", ", you hear", " as I told you", " with you",
            " before you go", ", that is all", ", and thank you", " right where it is", " right there",
            " with no time left", " before the others have left", " or as near as you get", " however far",
            ", and no further", ", as close as you can",
        ),
    ),
    Split.VALIDATION: Wording(
        requests=(
            "seek", "travel to", "trot to", "trot over to", "hunt for", "visit", "hurry to", "hurry over to",
            "steer to", "steer towards", "take yourself to", "set out for", "march to", "march over to",
            "sniff out", "return to",
        ),
        wishes=("fetch me to", "I would like", "my wish is", "halt at"),
        tails=("", " and halt there", " without delay", " and pause there"),
        whole={FIND: ("somewhere is a {}, seek it", "the {} is your destination")},
        names={
            FIND: ("the {}", "some {}", "that {}"),
            **_sides("the {} to the SIDE", "the {} which stands to the SIDE", "the SIDE of the two {s}"),
            "nearer": ("the {} which is closer", "the closer of the two {s}", "the {} lying nearer"),
            "farther": ("the {} which is further off", "the further of the two {s}", "the {} lying farther off"),
        },
        openings=("hey, ", "would you ", "quickly "),
        endings=(" soon", ", thanks"),
    ),
    Split.TEST: Wording(
        requests=(
            "locate", "proceed to", "make your way to", "track down", "discover", "wander over to",
            "advance to", "advance towards", "rush to", "press on to", "aim for", "stroll to", "dash to",
            "dash over to", "scout for", "continue to",
        ),
        wishes=("guide me to", "I am after", "my target would be", "park beside"),
        tails=("", " and remain beside it", " at once", " and rest there"),
        whole={FIND: ("somebody left a {} around, locate it", "what I am after would be a {}")},
        names={
            FIND: ("the {}", "any {}", "our {}"),
            **_sides("the SIDEmost {}", "the {} being SIDEmost", "the SIDEmost one of those {s}"),
            "nearer": ("the closest {}", "the {} closest to us", "the closest one of those {s}"),
            "farther": ("the furthest {}", "the {} furthest from us", "the furthest one of those {s}"),
        },
        openings=("kindly ", "dog, ", "okay, "),
        endings=(" right now", ", will you"),
    ),
}  # fmt: skip

# Training puts these in place of other words, where they mean as little as made-up ones.
COMMON_WORDS = """
about above across again ago along also always among animal another answer any apple arm ask asked back bad
bed been began begin best better big bird black boat body book both bread bring brother build busy buy by
call came care carry cat catch children city clean clear clock cold come cook corner country cup cut dark
day dear deep does dinner done door down drink during each early earth eat edge egg else end enough even
evening ever every eye face fact fall family fast father feel few field fill fine fire fish five floor fly
food foot found four free fresh friday friend full game garden gave get give glad glass gone good got great
ground grow had hair half hand happy hard has hat head hear heard heavy help her high him his hold home hope
hot hour house how hundred idea into its job just keep key kind king knew know lady lamp land large last
late laugh learn leave leg less letter life light line list little live long look lost lot loud love low
lunch made make man many map mark may maybe meet men might milk mind money month moon more morning most
mother mountain mouth much music must name need never new news next nice night nine none noon nose nothing
number off often oil old only open or other out outside own page paint paper part party pass people perhaps
person picture piece place plan plant play point poor power press put question quick quiet quite rain read
ready real really rich river road rock roof round rule sad said salt same sand sat saw say school sea seat
second seem send sent serve set seven shall ship shoe shop short should shout show side sign since sing
sister sit six size sky sleep slow small snow soft some song sorry sound spring star start state step still
stone store story street strong such sugar summer sun sure sweet swim table talk tall tea tell ten test than
thank their them there these they thing think third this though thought three threw tie time tired together
told tomorrow too took top town toy train tree trip true try two uncle under until up upon use very village
voice walk wall want warm was wash watch water way wear weather week well went were wet what wheel when
while who whole why wide wife wild wind window winter wish with without woman wonder wood word work world
worry write wrong year yes yesterday yet young
"""
