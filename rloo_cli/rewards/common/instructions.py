"""Instructions that a program can verify, with the names and arguments of IFEval.

(Zhou et al., arXiv 2311.07911, appendix.) A check takes the completion and the instruction's
arguments. Sentences are split at . ! and ?, where IFEval's own code uses nltk's model; the
language of a response is not checked.
"""

import json
import re
from collections.abc import Callable, Mapping

Arguments = Mapping[str, object]
Check = Callable[[str, Arguments], bool]

CONSTRAINED_RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
SENTENCE_END = re.compile(r"[.!?]+(?=[\s\"')\]]|$)")


def word_list(text: str) -> list[str]:
    """The words of a text: runs of letters, digits and underscores, with ' and - inside."""
    return re.findall(r"\w+(?:['\u2019-]\w+)*", text)


def sentence_count(text: str) -> int:
    """The number of pieces that end in . ! or ?, or at the end of the text."""
    return sum(bool(word_list(piece)) for piece in SENTENCE_END.split(text))


def occurs(keyword: object, text: str) -> bool:
    """Whether a keyword is in a text as a whole word, ignoring case."""
    return keyword_count(keyword, text) > 0


def keyword_count(keyword: object, text: str) -> int:
    """How often a keyword is in a text as a whole word, ignoring case."""
    return len(re.findall(rf"(?<!\w){re.escape(str(keyword))}(?!\w)", text, re.IGNORECASE))


def compare_count(
    count: int, arguments: Arguments, number: str, relation: str = "relation"
) -> bool:
    """Whether a count is "at least" or "less than" an argument; without a relation: at least."""
    limit = int(str(arguments[number]))
    return count < limit if arguments.get(relation) == "less than" else count >= limit


def _items(arguments: Arguments, name: str) -> list[object]:
    value = arguments[name]
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_json(text: str) -> bool:
    bare = re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.IGNORECASE).strip()
    try:
        json.loads(bare)
    except (ValueError, RecursionError):
        return False
    return True


def _paragraphs(text: str, separator: str) -> list[str]:
    return [part for part in re.split(separator, text) if part.strip()]


def _starts_paragraph(text: str, arguments: Arguments) -> bool:
    parts, nth = _paragraphs(text, r"\n\s*\n"), int(str(arguments["nth_paragraph"]))
    if len(parts) != int(str(arguments["num_paragraphs"])) or not 0 < nth <= len(parts):
        return False
    words = word_list(parts[nth - 1])
    return bool(words) and words[0].lower() == str(arguments["first_word"]).lower()


def _two_responses(text: str, _: Arguments) -> bool:
    parts = [part.strip() for part in text.split("******") if part.strip()]
    return len(parts) == 2 and parts[0] != parts[1]


def _section_count(text: str, arguments: Arguments) -> int:
    name = re.escape(str(arguments["section_spliter"]))  # spelt as in IFEval
    return len(re.findall(rf"\s?{name}\s?\d+\s?", text))


def _marked_count(text: str, pattern: str) -> int:
    return len(re.findall(pattern, text, re.MULTILINE))


CHECKS: dict[str, Check] = {
    "keywords:existence": lambda t, a: all(occurs(k, t) for k in _items(a, "keywords")),
    "keywords:forbidden_words": lambda t, a: (
        not any(occurs(k, t) for k in _items(a, "forbidden_words"))
    ),
    "keywords:frequency": lambda t, a: compare_count(
        keyword_count(a["keyword"], t), a, "frequency"
    ),
    "keywords:letter_frequency": lambda t, a: compare_count(
        t.lower().count(str(a["letter"]).lower()), a, "let_frequency", "let_relation"
    ),
    "length_constraints:number_words": lambda t, a: compare_count(
        len(word_list(t)), a, "num_words"
    ),
    "length_constraints:number_sentences": lambda t, a: compare_count(
        sentence_count(t), a, "num_sentences"
    ),
    "length_constraints:number_paragraphs": lambda t, a: (
        len(_paragraphs(t, r"\s?\*\*\*\s?")) == int(str(a["num_paragraphs"]))
    ),
    "length_constraints:nth_paragraph_first_word": _starts_paragraph,
    "detectable_content:number_placeholders": lambda t, a: (
        _marked_count(t, r"\[[^\[\]]+\]") >= int(str(a["num_placeholders"]))
    ),
    "detectable_content:postscript": lambda t, a: str(a["postscript_marker"]).lower() in t.lower(),
    "detectable_format:number_bullet_lists": lambda t, a: (
        _marked_count(t, r"^\s*(?:\*(?!\*)|-) *\S") == int(str(a["num_bullets"]))
    ),
    "detectable_format:number_highlighted_sections": lambda t, a: (
        _marked_count(t, r"\*\*[^\n*]+\*\*|(?<!\*)\*[^\n*]+\*(?!\*)")
        >= int(str(a["num_highlights"]))
    ),
    "detectable_format:multiple_sections": lambda t, a: (
        _section_count(t, a) >= int(str(a["num_sections"]))
    ),
    "detectable_format:constrained_response": lambda t, _: any(
        answer in t for answer in CONSTRAINED_RESPONSES
    ),
    "detectable_format:json_format": lambda t, _: _is_json(t),
    "detectable_format:title": lambda t, _: bool(re.search(r"<<[^\n<>]*[^\s<>][^\n<>]*>>", t)),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda t, a: (
        t.strip().lower().startswith(str(a["prompt_to_repeat"]).strip().lower())
    ),
    "startend:end_checker": lambda t, a: (
        t.strip().strip('"').lower().endswith(str(a["end_phrase"]).strip().lower())
    ),
    "startend:quotation": lambda t, _: len(s := t.strip()) > 1 and s[0] == s[-1] == '"',
    "change_case:english_lowercase": lambda t, _: t.islower(),
    "change_case:english_capital": lambda t, _: t.isupper(),
    "change_case:capital_word_frequency": lambda t, a: compare_count(
        sum(word.isupper() for word in word_list(t)), a, "capital_frequency", "capital_relation"
    ),
    "punctuation:no_comma": lambda t, _: "," not in t,
}


def is_followed(instruction: str, text: str, arguments: Arguments) -> bool:
    """Whether a completion follows an instruction; an empty one follows none.

    Raises KeyError for an unknown instruction, or a missing argument.
    """
    return bool(text.strip()) and CHECKS[instruction](text, arguments)
