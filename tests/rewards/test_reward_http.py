"""`type: http`: what is sent, what is read, and that no missing number is ever a zero."""

from typing import Any

import pytest
from assert_refused import assert_refused
from endpoint_cases import PAGE, in_turn
from reward_cases import CHAT, PLAIN, group

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.rewards.engine.arguments import RewardContext
from rloo_cli.rewards.engine.build import build_reward
from rloo_cli.rewards.engine.columns import check_reward_columns
from rloo_cli.rewards.engine.scoring import RewardFailed, Scores, score_groups
from rloo_cli.utils.errors import ConfigError, DataError

USER = [{"role": "user", "content": "Say"}]


def made(*words: str) -> Any:
    """The reward of `reward=http` with these keys."""
    given = [f"reward.http.{word}" for word in words]
    checked = check.check_config(compose_config(["+recipe=smoke", "reward=http", *given]))
    return build_reward("http", checked.rewards["http"])


def scored(*words: str, groups: Any = None, context: RewardContext = PLAIN) -> Scores:
    return score_groups([made(*words)], groups or [group("a", "b"), group("c", "d")], context)


def values(*words: str, **options: Any) -> list[float]:
    return scored(*words, **options).raw.flatten().tolist()


def by_text(path: str, body: Any) -> tuple[int, Any]:
    return 200, {"scores": [float(ord(c[-1])) for c in body["completions"]]}


def test_a_service_gets_prompts_completions_and_the_columns_asked_for(serve: Any) -> None:
    stub = serve(by_text)
    groups = [group("a", "b", answer=7, other=1), group("c", "d", answer=None, other=2)]
    words = (f"url={stub.url}/score", "columns=[answer]", "model=mine")
    assert values(*words, groups=groups) == [97.0, 98.0, 99.0, 100.0]
    completions = ["a", "b", "c", "d"]
    body = {"prompts": ["Say"] * 4, "completions": completions, "answer": [7, 7, None, None]}
    assert stub.asked == [("/score", body | {"model": "mine"})]


def test_conversations_are_sent_as_they_are(serve: Any) -> None:
    stub = serve(in_turn((200, {"scores": [1, 2]})))
    assert values(f"url={stub.url}", groups=[group("a", "b", prompt=USER)], context=CHAT) == [1, 2]
    body = stub.asked[0][1]
    assert body["prompts"] == [USER, USER]
    assert body["completions"][1] == [{"role": "assistant", "content": "b"}]


def test_batches_are_asked_for_at_once_and_come_back_in_their_places(serve: Any) -> None:
    stub = serve(by_text)
    groups = [group(*"abcde"), group(*"fghij")]
    found = values(f"url={stub.url}", "batch_size=3", "concurrency=2", groups=groups)
    assert found == [float(ord(c)) for c in "abcdefghij"]
    assert sorted(len(b["prompts"]) for _, b in stub.asked) == [1, 3, 3, 3] and stub.most <= 2


WRONG = {
    "one too few": ({"scores": [1.0, 2.0, 3.0]}, "3 scores, not 4"),
    "nan": ('{"scores": [1, NaN, 2, 3]}', "gave nan"),
    "a string": ({"scores": [1, "2", 2, 3]}, "gave '2' (str), not a number"),
    "infinite": ('{"scores": [1, Infinity, 2, 3]}', "beyond 1e30"),
    "no list": ({"scores": 1.0}, 'expected {"scores": [...]}'),
    "another form": ({"rewards": [1, 2, 3, 4]}, 'expected {"scores": [...]}'),
    "no JSON": ("1 2 3 4", "did not answer with JSON"),
    "a page": (PAGE, "HTML page"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_answer_is_a_failure_and_never_a_zero(serve: Any, case: str) -> None:
    said, why = WRONG[case]
    stub = serve(in_turn((200, said)))
    with pytest.raises(RewardFailed) as refused:
        scored(f"url={stub.url}", "retries=0")
    assert refused.value.code == 5 and why in str(refused.value)


def test_no_key_and_a_crash_are_failures_too(serve: Any) -> None:
    stub = serve(in_turn((401, "who are you")))
    with pytest.raises(RewardFailed, match=r"401: who .* key"):
        scored(f"url={stub.url}", "retries=0")
    stub = serve(in_turn((500, "sorry")))
    with pytest.raises(RewardFailed, match="500: sorry, 5 tries"):
        scored(f"url={stub.url}", "retries=0")


def test_null_does_not_apply_and_what_failed_under_none_is_counted(serve: Any) -> None:
    stub = serve(in_turn((200, {"scores": [1.0, None, 2, True]})))
    found = values(f"url={stub.url}")
    assert found[0] == 1.0 and found[1] != found[1] and found[2:] == [2.0, 1.0]
    stub = serve(in_turn((200, {"scores": [1.0, "x", 2.0, 3.0]})))
    scores = scored(f"url={stub.url}", "retries=0", "on_error=none", "max_error_rate=0.5")
    assert scores.error_rate == {"http": 0.25} and scores.raw.isnan().sum() == 1


def test_the_whole_call_is_tried_again(serve: Any) -> None:
    stub = serve(in_turn((200, {"scores": []}), (200, {"scores": [1, 2, 3, 4]})))
    assert values(f"url={stub.url}") == [1, 2, 3, 4]  # retries: 1


def test_a_service_that_hangs_is_left_at_the_deadline(serve: Any) -> None:
    import threading

    release = threading.Event()
    stub = serve(lambda path, body: (release.wait(20), (200, {}))[1])
    with pytest.raises(RewardFailed, match="no answer within"):
        scored(f"url={stub.url}", "retries=0", "timeout_s=0.3")
    release.set()


# vLLM's routes.


def vllm(path: str, body: Any) -> tuple[int, Any]:
    """The forms of vLLM 0.32; a reward is the length of what is read."""
    assert body["use_activation"] is False, "a reward would come through a sigmoid"
    if path == "/score":
        pairs = zip(body["text_1"], body["text_2"], strict=True)
        rows = [{"score": len(a) + 10.0 * len(b)} for a, b in pairs]
    else:
        read = body.get("input") or ["".join(m["content"] for m in body["messages"])]
        value = "probs" if path == "/classify" else "data"
        rows = [{value: [float(len(text))]} for text in read]
    rows = [{"index": i, "object": "x"} | row for i, row in enumerate(rows)]
    return 200, {"data": rows[::-1], "model": "m", "usage": {}}


@pytest.mark.parametrize("api", ["classify", "pooling"])
def test_vllm_reads_prompt_and_completion_as_one_text(serve: Any, api: str) -> None:
    stub = serve(vllm)
    groups = [group("a", "bcd")]
    assert values(f"url={stub.url}/v1", f"api={api}", groups=groups) == [4.0, 6.0]
    assert stub.asked[0] == (f"/{api}", {"input": ["Saya", "Saybcd"], "use_activation": False})
    words = ("template='{q}: {completion}'", "eos='<|end|>'", "batch_size=1", "model=rm")
    groups = [group("a", "bcd", q="Q")]
    groups[0].rollouts[1].finish_reason = "length"
    assert values(f"url={stub.url}", f"api={api}", *words, groups=groups) == [11.0, 6.0]
    assert {(b["input"][0], b["model"]) for _, b in stub.asked[1:]} == {
        ("Q: a<|end|>", "rm"),
        ("Q: bcd", "rm"),
    }


@pytest.mark.parametrize("api", ["classify", "pooling"])
def test_vllm_reads_conversations_in_the_models_own_template(serve: Any, api: str) -> None:
    stub = serve(vllm)
    groups = [group("a", "bcd", prompt=USER)]
    found = values(f"url={stub.url}", f"api={api}", groups=groups, context=CHAT)
    assert found == [4.0, 6.0] and len(stub.asked) == 2
    said = sorted(b["messages"][-1]["content"] for _, b in stub.asked)
    assert said == ["a", "bcd"] and all(b["messages"][0] == USER[0] for _, b in stub.asked)


def test_vllm_scores_pairs(serve: Any) -> None:
    stub = serve(vllm)
    groups = [group("a", "bcd"), group("e", "f", prompt="Sing")]
    assert values(f"url={stub.url}", "api=score", groups=groups) == [13.0, 33.0, 14.0, 14.0]
    assert stub.asked[0][1]["text_1"] == ["Say", "Say", "Sing", "Sing"]


def test_of_a_reward_per_token_the_last_counts_and_classes_are_refused(serve: Any) -> None:
    rows = [{"index": i, "data": [[9.0], [float(i)]]} for i in range(4)]
    assert values(f"url={serve(in_turn((200, {'data': rows}))).url}", "api=pooling") == [0, 1, 2, 3]
    rows = [{"index": i, "probs": [0.2, 0.8]} for i in range(4)]
    stub = serve(in_turn((200, {"data": rows})))
    with pytest.raises(RewardFailed, match="2 numbers"):
        scored(f"url={stub.url}", "api=classify", "retries=0")
    rows = [{"index": i, "score": 1.0} for i in (0, 1, 3, 3)]
    stub = serve(in_turn((200, {"data": rows})))
    with pytest.raises(RewardFailed, match="do not match the request"):
        scored(f"url={stub.url}", "api=score", "retries=0")


# Refused before anything is asked.

REFUSED = {
    "url=somewhere": "reward.http.url = 'somewhere' is not valid",
    "eos=x": "reward.http.eos is set",
    "template=x": "reward.http.template",
    "api=reward": "reward.http.api",
    "api_key_env=sk-abcdefghijklmnopqrstuvwxyz": "this looks like a secret",
    "'api_key_env=two words'": "api_key_env",
}


@pytest.mark.parametrize("word", REFUSED)
def test_a_key_that_is_wrong_is_named(word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        made(word.strip("'"))
    assert REFUSED[word] in str(refused.value)


def test_a_key_of_the_service_and_columns_are_looked_for_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NOT_THERE", raising=False)
    with pytest.raises(ConfigError) as caught:
        made("api_key_env=NOT_THERE")
    assert_refused(caught, 2, "NOT_THERE", fix="export NOT_THERE=")
    reward = made("api=classify", "template='{question} {completion}'")
    with pytest.raises(DataError) as caught:
        check_reward_columns([reward], ["answer"])
    assert_refused(caught, 4, "'question'")
