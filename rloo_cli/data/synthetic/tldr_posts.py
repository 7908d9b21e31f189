"""Posts, what careless people make of them, and the hidden rule that says how good a summary is.

A post tells six facts (who did what to which thing, when, how they felt, what the writer wants)
among sentences about other people, things and days, in any order:

    POST : i saw my uncle on friday . on monday my boss sold my bike . ... i plan to sue .

A summary is one sentence: "my boss sold my bike on monday , they were bored , i want to sue ."
Nothing here imports torch.
"""

import random
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass

FACT_WORDS = {
    "who": "boss sister brother roommate neighbor girlfriend mother father teacher cousin uncle"
    " coworker landlord friend wife husband",
    "act": "stole lost sold hid borrowed burned wrecked scratched painted returned",
    "thing": "car bike phone laptop guitar camera wallet ring jacket couch lamp piano boat tent"
    " mirror drone",
    "when": "monday tuesday wednesday thursday friday saturday sunday christmas easter halloween",
    "why": "jealous drunk tired angry bored lonely careless stressed sick greedy",
    "want": "leave sue apologize wait argue forgive complain move quit cry",
}
WORDS_OF_FACT = {name: words.split() for name, words in FACT_WORDS.items()}
FACT_OF_WORD = {word: name for name, words in WORDS_OF_FACT.items() for word in words}
# What stands before a fact's word where a summary says it of the right thing.
BEFORE = {"who": "my", "thing": "my", "when": "on", "why": "were", "want": "to"}
HEAD, END = "POST :", "\nTL;DR :\n"

EVENT = ("my {who} {act} my {thing} on {when} .", "on {when} my {who} {act} my {thing} .")
FEELING = ("i think they were {why} .", "they say they were {why} .")
WISH = ("now i want to {want} .", "i plan to {want} .")
ASIDES = (
    "i saw my {who} last {when} .",
    "my {who} has a {thing} .",
    "my {who} was {why} once .",
    "my {who} should {want} .",
    "i like my {thing} .",
)


@dataclass(frozen=True)
class Facts:
    """What a post is about, a word each."""

    who: str
    act: str
    thing: str
    when: str
    why: str
    want: str


def sample_facts(rng: random.Random) -> Facts:
    """Six facts by chance."""
    return Facts(**{name: rng.choice(words) for name, words in WORDS_OF_FACT.items()})


def write_post(facts: Facts, rng: random.Random) -> str:
    """A post that tells these facts, with one or two asides."""
    told = [rng.choice(frames).format(**asdict(facts)) for frames in (EVENT, FEELING, WISH)]
    asides = [frame.format(**asdict(_others(facts, rng)))
              for frame in rng.sample(ASIDES, rng.choice((1, 2)))]  # fmt: skip
    lines = told + asides
    rng.shuffle(lines)
    return f"{HEAD} {' '.join(lines)}{END}"


def _others(facts: Facts, rng: random.Random) -> Facts:
    """Facts of an aside: none is the post's own."""
    own = asdict(facts)
    return Facts(**{n: rng.choice([w for w in WORDS_OF_FACT[n] if w != own[n]]) for n in own})


def is_post(prompt: object) -> bool:
    """Whether a prompt is a post of ours."""
    return isinstance(prompt, str) and prompt.startswith(HEAD) and prompt.endswith(END)


def parse_post(prompt: str) -> Facts:
    """The facts of a post. Raises ValueError for a text that is none."""
    found: dict[str, str] = {}
    for frames in (EVENT, FEELING, WISH):
        for frame in frames:
            pattern = re.escape(frame).replace(r"\ ", " ")
            for name, words in WORDS_OF_FACT.items():
                pattern = pattern.replace(rf"\{{{name}\}}", f"(?P<{name}>{'|'.join(words)})")
            if match := re.search(pattern, prompt):
                found |= match.groupdict()
    if found.keys() != WORDS_OF_FACT.keys():
        raise ValueError(f"not a post of make:tldr: {prompt[:200]!r}")
    return Facts(**found)


# References.

BARE = 0.3  # how often a careless person tells no more than who did what
SAYS = {"when": 0.55, "why": 0.5, "want": 0.55}  # and how often else each of these
WRONG = 0.06  # how often a told fact is another's
VAGUE = 0.15  # how often who, act or thing is left open
CHATTER = 0.2  # how often words are added that say nothing
GLUE = "someone my stuff on , they were i want to ."
CHAT = ("so basically {}", "{} please help .", "{} sorry for the long post .")


def write_reference_summary(facts: Facts, rng: random.Random) -> str:
    """A careless person's summary: some facts left out, now and then one that is wrong."""
    other = asdict(_others(facts, rng))
    said = {n: other[n] if rng.random() < WRONG else w for n, w in asdict(facts).items()}
    vague: Callable[[], bool] = lambda: rng.random() < VAGUE  # noqa: E731
    who = "someone" if vague() else f"my {said['who']}"
    thing = "my stuff" if vague() else f"my {said['thing']}"
    parts = [f"{who} {said['act']} {thing}"]
    more = rng.random() >= BARE
    told = {name: more and rng.random() < share for name, share in SAYS.items()}
    if told["when"]:
        parts[0] += f" on {said['when']}"
    if told["why"]:
        parts.append(f"they were {said['why']}")
    if told["want"]:
        parts.append(f"i want to {said['want']}")
    text = " , ".join(parts) + " ."
    if rng.random() < CHATTER:
        text = rng.choice(CHAT).format(text)
    return text


# The hidden rule.

COVERED, MISTAKEN, TWICE, RAMBLING, UNENDED = 1.0, 1.0, 0.5, 0.1, 1.0
ENOUGH = 20  # words that say everything, and one or two more


def score_summary(prompt: str, summary: str) -> float:
    """How good a summary of this post is, by a rule that no training sees.

    +1 for each of the six facts that stands in its phrase ("my boss", "on monday"); -1 for each
    word that claims something else (another person, a fact out of its phrase); -0.5 for each
    fact word said again; -0.1 for each word beyond 20; -1 where it does not end in a full stop.
    """
    facts = asdict(parse_post(prompt))
    words = summary.split()
    seen: set[str] = set()
    total = 0.0
    for before, word in zip(["", *words], words, strict=False):
        name = FACT_OF_WORD.get(word)
        if name is None:
            continue
        placed = FACT_OF_WORD.get(before) == "who" or before == "someone" if name == "act" \
            else before == BEFORE[name]  # fmt: skip
        if word in seen:
            total -= TWICE
        elif word == facts[name] and placed:
            total += COVERED
        else:
            total -= MISTAKEN
        seen.add(word)
    total -= RAMBLING * max(0, len(words) - ENOUGH)
    return total - (UNENDED if words[-1:] != ["."] else 0.0)
