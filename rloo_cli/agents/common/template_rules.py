"""Ids between two turns by the rules of the package `renderers` (agent.renderer=renderers).

It has template rules, written by hand for the chat formats of many models; `turn_rendering` takes
the difference of two texts. The rules are used where they know the model, fit its tokenizer and put
the same ids between two turns as the difference does; else they are refused before sampling.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from rloo_cli.agents.common.turn_rendering import PROBE, TurnRenderer, tool_message
from rloo_cli.config.agent import RENDERERS, RENDERERS_PREFIX
from rloo_cli.config.old_names import list_nearest_first, nearest_names
from rloo_cli.utils.errors import ConfigError, GenerationError, refuse
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "agent.renderer"
LISTED = 12  # names of renderers in an error
Bridge = Callable[..., Any]  # `bridge_to_next_turn` of a renderer


class RuleRenderer(TurnRenderer):
    """A `TurnRenderer` whose ids between two turns come from template rules."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        template_kwargs: JsonObject,
        stop_ids: set[int],
        bridge: Bridge,
    ):
        super().__init__(tokenizer, template_kwargs, stop_ids)
        self.bridge = bridge

    def new_ids(
        self,
        calls: Sequence[JsonObject],
        messages: Sequence[JsonObject],
        schemas: Sequence[JsonObject],
        last_sampled_id: int,
    ) -> list[int]:
        """`TurnRenderer.new_ids`; the difference if no rule covers these messages."""
        by_rule = self.ids_by_rule(messages, schemas, last_sampled_id)
        if by_rule is not None:
            return by_rule
        return super().new_ids(calls, messages, schemas, last_sampled_id)

    def ids_by_rule(
        self,
        messages: Sequence[JsonObject],
        schemas: Sequence[JsonObject],
        last_sampled_id: int,
    ) -> list[int] | None:
        """The ids that the rules put after a turn that ended with this id; None if no rule applies.

        Raises GenerationError if they would change the ids before.
        """
        prompt = self._ids([{"role": "user", "content": "?"}], [], True)
        said = [*self.tokenizer("...", add_special_tokens=False)["input_ids"], last_sampled_id]
        tools = [schema["function"] for schema in schemas]
        bridged = self.bridge(prompt, said, [dict(m) for m in messages], tools=tools or None)
        if bridged is None:
            return None
        before, whole = [*prompt, *said], list(bridged.token_ids)
        if whole[: len(before)] != before:
            why = f"after {self.tokenizer.decode(said)!r}"
            what = "the rules of renderers change sampled ids"
            refuse(KEY, what, f"{KEY}=difference", why, error=GenerationError)
        return whole[len(before) :]

    def check_rules(self) -> None:
        """Check that rules and difference agree on a tool's answer. Raises ConfigError."""
        call: JsonObject = {"name": "tool", "arguments": {}}
        answer = [tool_message(0, call, PROBE)]
        stop = next(iter(sorted(self.stop_ids)), -1)
        try:
            ours = TurnRenderer.new_ids(self, [call], answer, [], stop)
            theirs = self.ids_by_rule(answer, [], stop)
        except GenerationError as error:
            raise ConfigError(*error.problems) from None
        except Exception as error:  # rules for another model's tokenizer
            _refuse_rules(error)
        if theirs is None or theirs != ours:
            decode = self.tokenizer.decode
            shown = "nothing" if theirs is None else repr(decode(theirs))
            why = f"they put {shown} before the next turn, the chat template {decode(ours)!r}"
            _refuse_rules(why)


def build_renderer(
    asked: str,
    model_path: str,
    template_kwargs: JsonObject,
    tokenizer: "PreTrainedTokenizerBase",
    stop_ids: set[int],
) -> TurnRenderer:
    """The renderer selected by agent.renderer. Raises ConfigError if it does not fit."""
    if not asked.startswith(RENDERERS):
        return TurnRenderer(tokenizer, template_kwargs, stop_ids)
    name = asked.removeprefix(RENDERERS_PREFIX) if asked != RENDERERS else None
    rules = _load_rules(name, model_path, tokenizer)
    renderer = RuleRenderer(tokenizer, template_kwargs, stop_ids, rules.bridge_to_next_turn)
    renderer.check_rules()
    return renderer


def _load_rules(name: str | None, model_path: str, tokenizer: "PreTrainedTokenizerBase") -> Any:
    """The package's renderer of this name; None = the one registered for this model.

    Its own lookup by model asks a hub about unknown models, so it is not used.
    """
    from renderers.base import MODEL_RENDERER_MAP, create_renderer  # lazy: optional
    from renderers.configs import config_from_name  # lazy: optional

    known = sorted(set(MODEL_RENDERER_MAP.values()))
    chosen = name or MODEL_RENDERER_MAP.get(model_path)
    config = config_from_name(chosen) if chosen is not None and chosen in known else None
    if config is None:
        near = nearest_names(name, known) if name else []
        listed = list_nearest_first(near, known, LISTED)
        what = f"renderers has no rules {f'named {name}' if name else f'for {model_path}'}"
        fix = f"{KEY}={RENDERERS_PREFIX}{near[0] if near else 'NAME'}, or {KEY}=difference"
        refuse(KEY, what, fix, f"it has: {listed}")
    try:
        return create_renderer(tokenizer, config)
    except Exception as error:  # the tokenizer lacks tokens that its rules use
        _refuse_rules(error)


def _refuse_rules(why: str | Exception) -> NoReturn:
    what = "the rules of renderers do not fit this model's tokenizer and chat template"
    refuse(KEY, what, f"{KEY}=difference", why)
