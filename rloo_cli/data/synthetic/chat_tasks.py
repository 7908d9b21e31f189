"""Two tasks for a small chat model, made here.

Arithmetic: "What is 47 + 38? Reply in one short line." has the answer "85". A model of 135
million parameters can add, but talks around the number. (Differences are left out: it hardly learns
them in as many steps.) Held-out problems never appear in training.

Instructions: short writing tasks with instructions that a program can verify: length, format,
words. A prompt names a topic and one to three instructions, of IFEval's kinds (arXiv 2311.07911);
the columns `instruction_id_list` and `kwargs` are what the reward `ifeval` reads. Held-out prompts
are about topics that no training prompt is about.

Echo: a message to send with the tool `step` of scripts/openenv/echo_environment.py. The prompt
shows two calls, about other topics; held-out topics are others.
"""

import hashlib
import json
import random
from collections.abc import Callable

from rloo_cli.utils.files import JsonObject

HELD_OUT_PROBLEMS = 200  # of the 4,095 sums
QUESTION = "What is {problem}? Reply in one short line."
TOPICS = (
    "the sea", "a lost dog", "winter", "an old bridge", "bread", "the moon", "a bus ride", "rain",
    "a small garden", "coffee", "a library", "bicycles", "the first day of school", "bees",
    "a mountain village", "music", "a broken clock", "apples", "a long train journey", "friendship",
    "the colour blue", "a market on Sunday", "cats", "a letter from a friend", "football",
    "a summer evening", "trees in a city", "a good teacher", "maps", "a birthday", "snow",
    "learning to swim", "an empty house", "soup", "the night sky", "a river", "old photographs",
    "a busy kitchen", "running", "a lighthouse", "paper", "a visit to the doctor", "horses",
    "a game of chess", "autumn leaves", "the smell of books", "a storm", "a new pair of shoes",
)  # fmt: skip
HELD_OUT_TOPICS = (
    "a ferry", "honey", "a wooden chair", "spring", "an umbrella", "the desert", "a night train",
    "a bakery", "whales", "a quiet street", "telephones", "a walk with grandmother",
)  # fmt: skip
ECHO = "Send a message about {topic} with the tool step."
# Two messages that are sent: what a call looks like, which a small model does not know.
SHOWN_MESSAGES = {"the wind": "The wind is cold.", "a boat": "A boat is on the lake."}
SIZES = {"train": 4000, "test": 200}
COMMON_WORDS = ("the", "is", "and", "of", "in", "it")
END_PHRASES = ("That is all.", "What do you think?", "The end.")
Instruction = tuple[str, str, JsonObject]  # its name, the sentence that asks for it, its arguments


def arithmetic_problems() -> list[tuple[str, int]]:
    """All sums of two numbers of two digits with their answers, in an order that is the same
    everywhere. The larger number comes first: no sum is asked both ways."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, a + 1)]
    problems = [(f"{a} + {b}", a + b) for a, b in pairs]
    return sorted(problems, key=lambda p: hashlib.sha256(p[0].encode()).digest())


def arithmetic_examples(split: str) -> list[JsonObject]:
    """The problems of `train` or `test`, as conversations of one message."""
    problems = arithmetic_problems()
    chosen = {"train": problems[HELD_OUT_PROBLEMS:], "test": problems[:HELD_OUT_PROBLEMS]}[split]
    return [
        {
            "prompt": [{"role": "user", "content": QUESTION.format(problem=problem)}],
            "answer": str(answer),
        }
        for problem, answer in chosen
    ]


def _fewer_words(draw: random.Random) -> Instruction:
    n = draw.choice((12, 20, 30))
    name, values = "length_constraints:number_words", {"num_words": n, "relation": "less than"}
    return name, f"Use less than {n} words.", values


def _sentences(draw: random.Random) -> Instruction:
    n = draw.choice((2, 3))
    values = {"num_sentences": n, "relation": "less than"}
    return "length_constraints:number_sentences", f"Use less than {n} sentences.", values


def _forbidden(draw: random.Random) -> Instruction:
    words = draw.sample(COMMON_WORDS, 2)
    text = f'Do not use the words "{words[0]}" and "{words[1]}".'
    return "keywords:forbidden_words", text, {"forbidden_words": words}


def _lowercase(_: random.Random) -> Instruction:
    return "change_case:english_lowercase", "Use lowercase letters only.", {}


def _no_comma(_: random.Random) -> Instruction:
    return "punctuation:no_comma", "Do not use any commas.", {}


def _bullets(draw: random.Random) -> Instruction:
    n = draw.choice((2, 3))
    text = f"Answer with exactly {n} bullet points, each on a line that begins with *."
    return "detectable_format:number_bullet_lists", text, {"num_bullets": n}


def _end_phrase(draw: random.Random) -> Instruction:
    phrase = draw.choice(END_PHRASES)
    return "startend:end_checker", f'End with exactly "{phrase}"', {"end_phrase": phrase}


def _quotation(_: random.Random) -> Instruction:
    return "startend:quotation", "Put your whole answer in double quotation marks.", {}


# One of each group at most: two of one group could contradict each other.
GROUPS: tuple[tuple[Callable[[random.Random], Instruction], ...], ...] = (
    (_fewer_words, _sentences),
    (_forbidden, _no_comma),
    (_bullets, _end_phrase, _quotation),
    (_lowercase,),
)


def instruction_examples(split: str) -> list[JsonObject]:
    """The prompts of `train` or `test`, as conversations of one message."""
    topics = {"train": TOPICS, "test": HELD_OUT_TOPICS}[split]
    draw = random.Random(f"instructions {split}")
    return [_example(draw, topics[i % len(topics)]) for i in range(SIZES[split])]


def _example(draw: random.Random, topic: str) -> JsonObject:
    groups = draw.sample(GROUPS, draw.choice((1, 2, 2, 3)))
    chosen = [draw.choice(group)(draw) for group in groups]
    if any("lowercase" in name for name, _, _ in chosen):  # a phrase with capitals contradicts it
        chosen = [instruction for instruction in chosen if "end_phrase" not in instruction[2]]
    content = " ".join([f"Write about {topic}.", *(text for _, text, _ in chosen)])
    return {
        "prompt": [{"role": "user", "content": content}],
        "instruction_id_list": [name for name, _, _ in chosen],
        # As text: Arrow would give every dict the keys of all.
        "kwargs": json.dumps([values for _, _, values in chosen]),
    }


def echo_examples(split: str) -> list[JsonObject]:
    """A message to send about each topic of `train` or `test`, after two that were sent."""
    topics = {"train": TOPICS, "test": HELD_OUT_TOPICS}[split]
    shown: list[JsonObject] = []
    for topic, message in SHOWN_MESSAGES.items():
        call = json.dumps({"name": "step", "arguments": {"message": message}})
        shown.append({"role": "user", "content": ECHO.format(topic=topic)})
        shown.append({"role": "assistant", "content": f"<tool_call>{call}</tool_call>"})
    asked = [{"role": "user", "content": ECHO.format(topic=topic)} for topic in topics]
    return [{"prompt": [*shown, last]} for last in asked]
