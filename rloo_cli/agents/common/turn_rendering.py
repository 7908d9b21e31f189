"""A tool's answer as ids: the chat template with the new messages and without them.

Sampled ids are never tokenized again. For a placeholder conversation (a question, and the calls as
they were made) the template renders a text without and with the answers; whatever follows the
assistant's turn in the longer one is appended to the sampled ids. The shorter text must be a
prefix of the longer up to that point, else the template is refused by name.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from rloo_cli.data.chat_templates import apply_chat_template
from rloo_cli.utils.errors import ConfigError, GenerationError, RunError, refuse
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rloo_cli.data.vision_processor import VisionProcessor

CUT_MARK = " [cut]"
# An observation that tokenizers tend to merge with the text around it.
HOSTILE = "  \n\n<tool_response>\u00e9\u4e16 [INST] 0x00\r\n\t}}\n "
PROBE = "tool-answer-probe"
ID_LENGTH = 9  # of a call, as Mistral's templates require


class TurnRenderer:
    """Renders what is new between two turns, for one tokenizer.

    `stop_ids` end a turn. `vision` knows the image tokens; None = no images.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        template_kwargs: JsonObject,
        stop_ids: set[int],
        vision: "VisionProcessor | None" = None,
    ):
        self.tokenizer, self.template_kwargs = tokenizer, template_kwargs
        self.stop_ids, self.vision = stop_ids, vision
        special = {str(t) for t in tokenizer.all_special_tokens}
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special |= {str(t) for t in added if t.special}
        self.special_texts = sorted((s for s in special if s), key=len, reverse=True)

    def split_specials(self, text: str) -> str:
        """Text in which every special token's text is broken up by a space."""
        for special in self.special_texts:
            text = text.replace(special, special[:1] + " " + special[1:])
        return text

    def clean_observation(self, text: str, max_tokens: int) -> tuple[str, int]:
        """A tool's text as the model sees it, and its tokens.

        Texts of special tokens get a space, so that a tool cannot end or begin a turn; beyond
        `max_tokens` it is cut, with a note that says so.
        """
        text = self.split_specials(text)
        # One token has at most a few dozen characters; the rest need not be tokenized to be cut.
        text = text[: 64 * max_tokens]
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        count = len(encoded["input_ids"])
        if count <= max_tokens:
            return text, count
        end = encoded["offset_mapping"][max_tokens - 1][1] if max_tokens else 0
        return text[:end] + CUT_MARK, max_tokens

    def new_ids(
        self,
        calls: Sequence[JsonObject],
        messages: Sequence[JsonObject],
        schemas: Sequence[JsonObject],
        last_sampled_id: int,
    ) -> list[int]:
        """The ids between a turn that ended with `last_sampled_id` and the next one.

        `messages`: the new ones; `calls`: those of the turn before. Raises GenerationError.
        """
        return self.new_ids_with_images(calls, messages, schemas, last_sampled_id, ())[1]

    def new_ids_with_images(
        self,
        calls: Sequence[JsonObject],
        messages: Sequence[JsonObject],
        schemas: Sequence[JsonObject],
        last_sampled_id: int,
        sizes: Sequence[tuple[int, int]],
    ) -> tuple[list[int], list[int]]:
        """(the same ids, the ids with one placeholder per image); `sizes`: of the images."""
        before, shorter = self._conversation_before(calls, schemas)
        text = self._text([*before, *messages], schemas, True)
        longer = self.expanded(text, ())
        end = self._turn_end(shorter, longer)
        # If a stop string ended the turn, the token that ends a turn is still missing.
        is_open = end > 0 and longer[end - 1] in self.stop_ids
        is_open = is_open and last_sampled_id not in self.stop_ids
        begin = end - 1 if is_open else end
        whole = self.expanded(text, sizes) if sizes else longer
        return whole[begin:], longer[begin:]

    def expanded(self, text: str, sizes: Sequence[tuple[int, int]]) -> list[int]:
        """The ids of a rendered text with images of these sizes (width, height)."""
        if self.vision is None or not sizes:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return self.vision.expand_prompt(text, sizes)

    def image_tokens(self, size: tuple[int, int]) -> int:
        """The tokens of an image of this size."""
        assert self.vision is not None, "images are not enabled"
        return self.vision.num_tokens(size)

    def shows_images(self, schemas: Sequence[JsonObject]) -> bool:
        """Whether the chat template writes a placeholder for an image in a tool's answer."""
        if self.vision is None:
            return False
        name = schemas[0]["function"]["name"] if schemas else "tool"
        call: JsonObject = {"name": name, "arguments": {}}
        parts = [{"type": "image"}, {"type": "text", "text": PROBE}]
        try:
            shown = self._text([*_before([call]), tool_message(0, call, parts)], schemas, True)
        except Exception:  # a template is code and can raise anything
            return False
        return PROBE in shown and shown.count(self.vision.processor.image_token) == 1

    def _conversation_before(
        self, calls: Sequence[JsonObject], schemas: Sequence[JsonObject]
    ) -> tuple[list[JsonObject], list[int]]:
        """The placeholder for the conversation so far, and its ids.

        A model may make calls that its template refuses to render (several at once, arguments that
        are not an object). The turn is never rendered again, so simpler calls can replace them.
        """
        plain = [c if isinstance(c["arguments"], dict) else c | {"arguments": {}} for c in calls]
        why = Exception()
        for written in (calls, plain, plain[:1]):
            try:
                before = _before(written)
                return before, self._ids(before, schemas, False)
            except Exception as error:  # a template is code and can raise anything
                why = error
        what = "the chat template refuses a turn with calls"
        self._refuse_template(what, why, GenerationError)

    def _turn_end(self, shorter: list[int], longer: list[int]) -> int:
        """Where the assistant's turn ends in the longer text, its end token included."""
        stops = [i for i, token in enumerate(shorter) if token in self.stop_ids]
        end = stops[-1] + 1 if stops else len(shorter)
        if longer[:end] == shorter[:end]:
            return end
        # Some templates render an assistant's last turn differently from earlier ones. A difference
        # inside that turn does not matter, for it is never rendered again: only its end counts.
        stops_at = [i for i, token in enumerate(longer) if token in self.stop_ids]
        if stops and len(stops_at) >= len(stops):
            return stops_at[len(stops) - 1] + 1
        pairs = zip(shorter, longer, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(longer))
        decode = self.tokenizer.decode
        why = f"without the answer: {decode(shorter[at : at + 12])!r}, with it:"
        why += f" {decode(longer[at : at + 12])!r}"
        what = "the chat template renders a turn differently once another message follows"
        self._refuse_template(what, why, GenerationError)

    def _ids(
        self, messages: Sequence[JsonObject], schemas: Sequence[JsonObject], generate: bool
    ) -> list[int]:
        return self.expanded(self._text(messages, schemas, generate), ())

    def _text(
        self, messages: Sequence[JsonObject], schemas: Sequence[JsonObject], generate: bool
    ) -> str:
        return apply_chat_template(
            self.tokenizer, list(messages), tools=list(schemas) or None,
            add_generation_prompt=generate, **self.template_kwargs,
        )  # fmt: skip

    def _refuse_template(
        self, what: str, why: str | Exception, error: type[RunError] = ConfigError
    ) -> NoReturn:
        name = getattr(self.tokenizer, "name_or_path", "")
        where = f"the chat template of {name}" if name else "the tokenizer's chat template"
        refuse(where, what, "model.chat_template=FILE, one with tools", why, error=error)

    def check_template(self, schemas: Sequence[JsonObject]) -> None:
        """Refuse a template that drops tool answers. Raises ConfigError."""
        name = schemas[0]["function"]["name"] if schemas else "tool"
        call: JsonObject = {"name": name, "arguments": {}}
        stop = next(iter(sorted(self.stop_ids)), -1)
        for text in (PROBE, f"{HOSTILE}{PROBE}{HOSTILE}"):
            try:
                answer = tool_message(0, call, text)
                self.new_ids([call], [answer], schemas, stop)
                shown = self._text([*_before([call]), answer], schemas, True)
            except GenerationError as error:
                raise ConfigError(*error.problems) from None
            except Exception as error:  # a template is code and can raise anything
                what = "the chat template refuses a tool's answer"
                self._refuse_template(what, error)
            if PROBE not in shown:  # not by ids: a small vocabulary may map them to unknown
                what = "the chat template leaves out a tool's answer"
                self._refuse_template(what, "a message of role tool does not appear in its text")


def _before(calls: Sequence[JsonObject]) -> list[JsonObject]:
    """A placeholder for the conversation so far, with the calls as they were made."""
    said: JsonObject = {"role": "assistant", "content": "" if calls else "..."}
    if calls:
        said["tool_calls"] = [call_message(i, call) for i, call in enumerate(calls)]
    return [{"role": "user", "content": "?"}, said]


def call_id(index: int) -> str:
    """The id of call number `index` of a turn."""
    return f"call{index:0{ID_LENGTH - 4}d}"


def call_message(index: int, call: JsonObject) -> JsonObject:
    """A call, as chat templates take it."""
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {"id": call_id(index), "type": "function", "function": function}


def tool_message(index: int, call: JsonObject, content: str | list[JsonObject]) -> JsonObject:
    """The answer to a call, as chat templates take it."""
    message: JsonObject = {"role": "tool", "name": call["name"], "content": content}
    return message | {"tool_call_id": call_id(index)}
