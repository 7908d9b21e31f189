"""Questions to services: what is asked again, what is said of the rest, and where keys go."""

import asyncio
import threading
import time
from typing import Any

import pytest
from assert_refused import assert_refused
from endpoint_cases import PAGE, in_turn

from rloo_cli.rewards.common import http_client
from rloo_cli.rewards.common.http_client import EndpointError, HttpService, JsonClient
from rloo_cli.utils import http
from rloo_cli.utils.errors import ConfigError

OK = (200, {"right": True})


def ask(url: str, limit_s: float = 10.0, count: int = 1, **keys: Any) -> list[Any]:
    """The answers to `count` questions, or what was raised."""
    given = {"api_key_env": None, "concurrency": 4, "request_timeout_s": 5.0} | keys
    service = HttpService(url, **given)

    async def all_of_them() -> list[Any]:
        async with JsonClient(service, limit_s) as client:
            asked = (client.post("/ask", {"n": n}) for n in range(count))
            return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 0])
def test_a_busy_or_broken_service_is_asked_again(serve: Any, status: int) -> None:
    stub = serve(in_turn((status, "later"), (status, "later"), OK))
    assert ask(stub.url) == [{"right": True}]
    assert stub.asked == [("/ask", {"n": 0})] * 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 422, 301])
def test_a_refusal_is_said_at_once(serve: Any, status: int) -> None:
    stub = serve(in_turn((status, {"error": {"message": "not so"}}, {"Location": "/other"})))
    (error,) = ask(stub.url)
    assert f"{stub.url}/ask" in str(error) and f"{status}: not so" in str(error)
    assert len(stub.asked) == 1
    assert error.final == (status not in (400, 413, 422))  # these are of the one question


def test_tries_end_and_the_last_answer_is_said(serve: Any) -> None:
    stub = serve(in_turn((503, "x" * 5000)))
    (error,) = ask(stub.url)
    assert isinstance(error, EndpointError) and not error.final
    assert "503" in str(error) and "5 tries" in str(error) and len(str(error)) < 300
    assert len(stub.asked) == http.MAX_TRIES


def test_a_service_that_says_when_is_asked_then_if_there_is_time(serve: Any) -> None:
    stub = serve(in_turn((429, "", {"Retry-After": "0.3"}), OK))
    began = time.monotonic()
    assert ask(stub.url) == [{"right": True}]
    assert time.monotonic() - began >= 0.3
    stub = serve(in_turn((429, "", {"Retry-After": "3600"}), OK))
    assert "429" in str(ask(stub.url)[0])
    assert len(stub.asked) == 1


@pytest.mark.parametrize(
    ("after", "seconds"),
    [("2", 2.0), ("-1", 0.0), ("soon", 0.7), ("", 0.7)],
)
def test_what_a_retry_after_means(after: str, seconds: float) -> None:
    assert http._retry_after_seconds(after, 0.7) == seconds
    assert http._retry_after_seconds("Wed, 21 Oct 2015 07:28:00 GMT", 0.7) == 0.0


def test_a_slow_request_is_repeated_while_there_is_time(serve: Any) -> None:
    first = threading.Event()

    def answer(path: str, body: Any) -> tuple[Any, ...]:
        if not first.is_set():
            first.set()
            time.sleep(0.6)
        return OK

    stub = serve(answer)
    assert ask(stub.url, request_timeout_s=0.2) == [{"right": True}]
    stub = serve(lambda path, body: (time.sleep(0.5), OK)[1])
    (error,) = ask(stub.url, limit_s=0.3)
    assert "no answer within" in str(error)
    assert len(stub.asked) <= 1  # a busy machine may not have read the request in 0.3 s


def test_nobody_there_is_final_and_names_the_address() -> None:
    url = "http://127.0.0.1:9"  # discard: nothing listens
    (error,) = ask(url, limit_s=0.2)
    assert error.final and url in str(error) and "no connection" in str(error)


@pytest.mark.parametrize("status", [200, 404, 502])
def test_a_page_of_html_is_recognised(serve: Any, status: int) -> None:
    (error,) = ask(serve(in_turn((status, PAGE))).url)
    assert "HTML page" in str(error) and "nginx" not in str(error)


def test_what_is_no_json_is_shown(serve: Any) -> None:
    (error,) = ask(serve(in_turn((200, "hello"))).url)
    assert "did not answer with JSON: 'hello'" in str(error)


def test_no_more_requests_than_allowed_are_under_way(serve: Any) -> None:
    stub = serve(lambda path, body: (time.sleep(0.02), OK)[1])
    assert ask(stub.url, count=12, concurrency=3) == [{"right": True}] * 12
    assert stub.most <= 3


def test_clients_of_one_loop_share_the_limit(serve: Any) -> None:
    stub = serve(lambda path, body: (time.sleep(0.02), OK)[1])
    service = HttpService(stub.url, None, 2, 5.0)

    async def one() -> Any:
        async with JsonClient(service, 10.0) as client:
            return await client.post("", {})

    async def many() -> None:
        await asyncio.gather(*(one() for _ in range(8)))

    asyncio.run(many())
    assert len(stub.asked) == 8 and stub.most <= 2


def test_a_key_goes_to_the_service_and_into_no_message(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "very-private")  # a name that no pattern takes for a secret's
    stub = serve(in_turn((401, {"error": {"message": "no such key: very-private"}})))
    (error,) = ask(stub.url, api_key_env="MINE")
    assert stub.keys == ["Bearer very-private"]
    assert "very-private" not in str(error) and "MINE" in str(error)
    (error,) = ask(stub.url)
    assert stub.keys[1] is None and "it needs a key" in str(error)


def test_a_redirect_is_not_followed_with_the_key(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "very-private")
    other = serve(in_turn(OK))
    stub = serve(in_turn((307, "", {"Location": other.url})))
    (error,) = ask(stub.url, api_key_env="MINE")
    assert "307" in str(error) and other.asked == []


def test_a_key_that_is_not_there_is_missed_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MINE", raising=False)
    with pytest.raises(ConfigError) as caught:
        http_client.check_api_key("eval.judge.api_key_env", "MINE")
    assert_refused(caught, 2, "MINE", where="eval.judge.api_key_env", fix="export MINE=")
    monkeypatch.setenv("MINE", "x")
    http_client.check_api_key("eval.judge.api_key_env", "MINE")
    http_client.check_api_key("eval.judge.api_key_env", None)


def test_waiting_ends_with_what_the_caller_raises_and_closes_the_request(serve: Any) -> None:
    stub = serve(lambda path, body: (time.sleep(0.5), OK)[1])
    cancelled = threading.Event()

    async def work() -> None:
        try:
            async with JsonClient(HttpService(stub.url, None, 1, 30.0), 30.0) as client:
                await client.post("", {})
        finally:
            cancelled.set()

    def poll() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        http.run_in_event_loop(work(), poll)
    assert cancelled.is_set()


def test_waiting_gives_what_came_or_what_was_raised() -> None:
    async def work(value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    assert http.run_in_event_loop(work(3)) == 3
    with pytest.raises(ZeroDivisionError):
        http.run_in_event_loop(work(ZeroDivisionError()))
