"""`type: judge`: what the model is asked, how its answer is read, and when that is a failure."""

import threading
import time
from typing import Any

import pytest
from assert_refused import assert_refused
from endpoint_cases import Stub, chats, in_turn
from reward_cases import CHAT, PLAIN, group

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.rewards.engine.arguments import RewardContext
from rloo_cli.rewards.engine.build import build_reward, reward_from_callable
from rloo_cli.rewards.engine.columns import check_reward_columns
from rloo_cli.rewards.engine.scoring import RewardFailed, Scores, score_groups
from rloo_cli.utils.errors import ConfigError, DataError


def made(*words: str) -> Any:
    """The reward of `reward=judge` with these keys."""
    given = [f"reward.judge.{word}" for word in ("model=m", *words)]
    checked = check.check_config(compose_config(["+recipe=smoke", "reward=judge", *given]))
    return build_reward("judge", checked.rewards["judge"])


def scored(stub: Stub, *words: str, groups: Any = None, context: RewardContext = PLAIN) -> Scores:
    reward = made(f"base_url={stub.url}/v1", *words)
    return score_groups([reward], groups or [group("3", "7")], context)


def echo(question: str) -> str:
    """Rates an answer by the number that it is."""
    said = question.split("--- answer ---\n")[1].split("\n")[0]
    return f"It could be a 5. Score: {said}"


def test_a_row_is_asked_about_once_and_its_number_is_scaled(serve: Any) -> None:
    stub = serve(chats(echo))
    scores = scored(stub, groups=[group("3", "7.5"), group("10", "0")])
    assert scores.raw.flatten().tolist() == [0.3, 0.75, 1.0, 0.0]
    assert len(stub.asked) == 4
    assert scores.extras["judge_said"][0].endswith("Score: 3")
    assert scored(stub, "scale=raw", "maximum=20").raw.flatten().tolist() == [3.0, 7.0]


def test_the_question_has_everything_that_the_config_says(serve: Any) -> None:
    stub = serve(chats(lambda question: "Score: 1"))
    words = ("template='{prompt} / {completion} / {answer} {{}}'", "system=Be fair.")
    words += ("max_tokens=9", "extra={seed: 3, temperature: 0.5}")
    prompt = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    scored(stub, *words, groups=[group("a", "b", prompt=prompt, answer="A")], context=CHAT)
    body = next(b for _, b in stub.asked if "/ a /" in b["messages"][1]["content"])
    assert body == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be fair."},
            {"role": "user", "content": "system: S\nuser: U / a / A {}"},
        ],
        "max_tokens": 9,
        "temperature": 0.5,
        "seed": 3,
    }
    scored(stub, "template='{completion}'", "temperature=null", "max_tokens=null")
    assert set(stub.asked[-1][1]) == {"model", "messages"}


ANSWERS = {
    "Score: 4": 4.0,
    "<think>Score: 9, or</think> Score: 4": 4.0,
    "First Score: 2. No, Score: 8": 8.0,
    "Score:10": 10.0,
    "Score: 11": None,
    "Score: -1": None,
    "<think>Score: 9": 9.0,  # it never stopped thinking: what it says is all there is
    "<think>Score: 9</think> I cannot": None,
    "eight": None,
    "": None,
    None: None,
}


@pytest.mark.slow_but("Score: 4", "Score:10", "<think>Score: 9</think> I cannot", "None")
@pytest.mark.parametrize("said", ANSWERS)
def test_an_answer_is_a_number_within_limits_or_a_failure(serve: Any, said: str | None) -> None:
    stub = serve(chats(lambda question: said))
    wanted = ANSWERS[said]
    if wanted is not None:
        assert scored(stub, "scale=raw").raw.flatten().tolist() == [wanted] * 2
        return
    with pytest.raises(RewardFailed) as refused:
        scored(stub)
    assert refused.value.code == 5 and len(stub.asked) == 4  # each row twice


def test_one_bad_answer_costs_its_row_alone_and_is_asked_for_again(serve: Any) -> None:
    def say(question: str) -> str:
        return "no idea" if "bad" in question else "Score: 5"

    stub = serve(chats(say))
    groups = [group("good", "bad", "good", "good", "good")]
    scores = scored(stub, "on_error=none", groups=groups)
    assert scores.raw.isnan().flatten().tolist() == [False, True, False, False, False]
    assert scores.error_rate == {"judge": 0.2}
    assert len(stub.asked) == 6
    left = iter(["hm", "Score: 5", "Score: 5"])
    assert scored(serve(chats(lambda q: next(left)))).raw.tolist() == [[[0.5, 0.5]]]


def test_answers_in_another_form_and_refusals_say_so(serve: Any) -> None:
    stub = serve(in_turn((200, {"answer": "Score: 5"})))
    with pytest.raises(RewardFailed, match="unexpected response format"):
        scored(stub, "retries=0")
    stub = serve(in_turn((404, {"error": {"message": "There is no `m`."}})))
    with pytest.raises(RewardFailed, match="no `m`"):
        scored(stub, "retries=0")


def test_the_judge_is_still_there_after_another_reward_blocked_the_event_loop(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rloo_cli.rewards.engine.reward_calls.EVENT_LOOP_GRACE_S", 0.2)
    release = threading.Event()

    async def blocks(completions: Any) -> list[float]:
        release.wait(20)
        return [0.0] * len(completions)

    stub = serve(chats(echo))
    judge = made(f"base_url={stub.url}/v1")
    common = judge.config.model_dump() | {"type": "function", "timeout_s": 0.2, "retries": 0}
    keys = {n: common[n] for n in type(judge.config).__mro__[1].model_fields}
    blocker = reward_from_callable("blocks", blocks, type(judge.config).__mro__[1](**keys))
    groups = [group("3", "7")]
    assert score_groups([judge], groups, PLAIN).raw.flatten().tolist() == [0.3, 0.7]
    with pytest.raises(RewardFailed, match="blocks"):
        score_groups([blocker], groups, PLAIN)
    assert score_groups([judge], groups, PLAIN).raw.flatten().tolist() == [0.3, 0.7]
    release.set()


def test_rows_wait_for_their_turn(serve: Any) -> None:
    stub = serve(chats(lambda question: (time.sleep(0.02), "Score: 5")[1]))
    scored(stub, "concurrency=2", groups=[group(*"abcdefgh")])
    assert len(stub.asked) == 8 and stub.most <= 2


REFUSED = {
    "template='{prompt}'": "reward.judge.template has no {completion}",
    "template='{completion.__class__}'": "reward.judge.template cannot be read",
    "template='{completion} {'": "reward.judge.template cannot be read",
    "pattern='('": "not a regular expression",
    "pattern=Score": "has no group",
    "minimum=10": "the judge's scale is empty",
    "base_url=localhost:8000": "reward.judge.base_url",
    "temperature=-1": "reward.judge.temperature",
}


@pytest.mark.parametrize("word", REFUSED)
def test_a_key_that_is_wrong_is_named(word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        made(word)
    assert REFUSED[word] in str(refused.value)


def test_columns_of_the_template_are_looked_for_before_any_model_loads() -> None:
    with pytest.raises(DataError) as caught:
        check_reward_columns([made("template='{rubric} {completion}'")], ["answer"])
    assert_refused(caught, 4, "'rubric'")
