"""Posts, what careless people make of them, and the hidden rule that scores a summary.

A post tells six facts (who did what to which thing, when, how they felt, what the writer wants)
among sentences about other people, things and days, in any order:

    POST : i saw my uncle on friday . on monday my boss sold my bike . ... i plan to sue .

A summary is one sentence: "my boss sold my bike on monday , they were bored , i want to sue ."
Nothing here imports torch.
"""

import random
import re
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
# The word before a fact's word if a summary says it of the right thing.
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
    """What a post is about: one word for each fact."""

    who: str
    act: str
    thing: str
    when: str
    why: str
    want: str


def sample_facts(rng: random.Random) -> Facts:
    """Sample six facts."""
    return Facts(**{name: rng.choice(words) for name, words in WORDS_OF_FACT.items()})


def write_post(facts: Facts, rng: random.Random) -> str:
    """A post that tells these facts, with one or two asides."""
    lines = [rng.choice(frames).format(**asdict(facts)) for frames in (EVENT, FEELING, WISH)]
    for frame in rng.sample(ASIDES, rng.choice((1, 2))):
        lines.append(frame.format(**asdict(_others(facts, rng))))
    rng.shuffle(lines)
    return f"{HEAD} {' '.join(lines)}{END}"


def _others(facts: Facts, rng: random.Random) -> Facts:
    """Sample facts of an aside: all differ from the post's."""
    taken = asdict(facts)
    return Facts(**{n: rng.choice([w for w in WORDS_OF_FACT[n] if w != taken[n]]) for n in taken})


def is_post(prompt: object) -> bool:
    """Whether a prompt is a post of make:tldr."""
    return isinstance(prompt, str) and prompt.startswith(HEAD) and prompt.endswith(END)


def parse_post(prompt: str) -> Facts:
    """The facts of a post. Raises ValueError for another text."""
    facts: dict[str, str] = {}
    for frame in (*EVENT, *FEELING, *WISH):
        pattern = re.escape(frame).replace(r"\ ", " ")
        for name, words in WORDS_OF_FACT.items():
            pattern = pattern.replace(rf"\{{{name}\}}", f"(?P<{name}>{'|'.join(words)})")
        if match := re.search(pattern, prompt):
            facts |= match.groupdict()
    if facts.keys() != WORDS_OF_FACT.keys():
        raise ValueError(f"not a post of make:tldr: {prompt[:200]!r}")
    return Facts(**facts)


# Reference summaries, and how often the careless people who write them do what.

BARE = 0.3  # they tell no more than who did what
SAYS = {"when": 0.55, "why": 0.5, "want": 0.55}  # if they tell more, they tell each of these
WRONG = 0.06  # a fact is another one than the post's
VAGUE = 0.15  # who or thing is left open
CHATTER = 0.2  # they add words that say nothing
GLUE = "someone my stuff on , they were i want to ."
CHAT = ("so basically {}", "{} please help .", "{} sorry for the long post .")


def write_reference_summary(facts: Facts, rng: random.Random) -> str:
    """A careless person's summary: it leaves out some facts, and now and then one is wrong."""
    other = asdict(_others(facts, rng))
    claims = {n: other[n] if rng.random() < WRONG else w for n, w in asdict(facts).items()}
    who = "someone" if rng.random() < VAGUE else f"my {claims['who']}"
    thing = "my stuff" if rng.random() < VAGUE else f"my {claims['thing']}"
    parts = [f"{who} {claims['act']} {thing}"]
    tells_more = rng.random() >= BARE
    tells = {name: tells_more and rng.random() < share for name, share in SAYS.items()}
    if tells["when"]:
        parts[0] += f" on {claims['when']}"
    if tells["why"]:
        parts.append(f"they were {claims['why']}")
    if tells["want"]:
        parts.append(f"i want to {claims['want']}")
    text = " , ".join(parts) + " ."
    if rng.random() < CHATTER:
        text = rng.choice(CHAT).format(text)
    return text


# The hidden rule.

COVERED, MISTAKEN, TWICE, RAMBLING, UNENDED = 1.0, 1.0, 0.5, 0.1, 1.0
ENOUGH = 20  # words that suffice to say everything, with one or two to spare


def score_summary(prompt: str, summary: str) -> float:
    """The score of a summary of this post by a rule that no training sees.

    +1 for each of the six facts in its phrase ("my boss", "on monday"); -1 for each word that
    claims something else (another person, a fact outside its phrase); -0.5 for each repeated fact
    word; -0.1 for each word beyond 20; -1 if it does not end in a full stop.
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
