"""Plays episodes of an environment of the package `verifiers`, which needs a separate Python.

The versions that verifiers needs are not vLLM's, so this is a program for that other Python. It
imports nothing of rloo, and verifiers only once it runs:

    python -P play_episodes.py data ID FOLDER     writes its rows, as files of JSON lines
    python -P play_episodes.py play ID            plays episodes: agent=proxy agent.lifetime=run

It asks the proxy at RLOO_PROXY_URL for episodes, with the token of RLOO_TOKEN. verifiers then
drives each one as it drives any other, with a client of OpenAI's API, and the environment's rubric
says its reward.
"""

import argparse
import asyncio
import contextvars
import json
import logging
import os
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

NEXT_TIMEOUT_S = 60.0  # of /rloo/next, which answers after 20 s at the latest
RETRY_S = 1.0
RUBRIC_ERROR = "Error calling reward function"  # how verifiers logs one before it takes 0.0

# Errors of the running episode's reward functions.
rubric_errors: contextvars.ContextVar[list[str]] = contextvars.ContextVar("rubric_errors")


class RubricErrors(logging.Handler):
    """Notes an error in a reward function, which verifiers logs and turns into a zero."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(RUBRIC_ERROR):
            found = rubric_errors.get(None)
            if found is not None:
                found.append(record.getMessage())


def load_environment(name: str, arguments: dict[str, Any]) -> Any:
    """The environment. Raises SystemExit for one whose episodes have no score of their own."""
    import verifiers as vf  # lazy: only the Python of this program has it

    if not hasattr(vf, "load_environment"):
        why = "has no load_environment any more; scripts/verifiers/requirements.lock has one"
        raise SystemExit(f"verifiers {vf.__version__} {why}")
    found = vf.load_environment(name, **arguments)
    if found.requires_group_rollouts or found.provides_advantages:
        why = "scores an episode by its siblings (group rewards), and each is played by itself here"
        raise SystemExit(f"the environment {name} {why}")
    logging.getLogger("verifiers").addHandler(RubricErrors())
    return found


def write_rows(environment: Any, folder: Path) -> list[str]:
    """Write the environment's rows, and those to evaluate on where it has some. -> what was written

    `info` is written as JSON's text, since its keys differ from row to row; verifiers reads that.
    """
    folder.mkdir(parents=True, exist_ok=True)
    splits = {"train": environment.build_dataset(), "test": environment.build_eval_dataset()}
    written = []
    for split, rows in splits.items():
        if rows is None:
            continue
        path = folder / f"{split}.jsonl"
        path.write_text("".join(json.dumps(_plain_row(row), default=str) + "\n" for row in rows))
        written.append(f"{path}: {len(rows)} rows")
    return written


def _plain_row(row: dict[str, Any]) -> dict[str, Any]:
    found = dict(row)
    if isinstance(found["prompt"], list):  # Arrow gives every message the keys of all
        found["prompt"] = [{k: v for k, v in m.items() if v is not None} for m in found["prompt"]]
    if isinstance(found.get("info"), dict):
        found["info"] = json.dumps(found["info"], default=str)
    return found


def policy_client(base_url: str, api_key: str) -> Any:
    """verifiers' client for the policy behind the proxy."""
    import openai  # lazy: as verifiers
    from verifiers.clients import OpenAIChatCompletionsClient  # lazy: as verifiers
    from verifiers.errors import OverlongPromptError  # lazy: as verifiers

    class PolicyClient(OpenAIChatCompletionsClient):
        async def get_native_response(self, *args: Any, **kwargs: Any) -> Any:
            """What the policy says. Where a limit of the run has ended the episode, verifiers hears
            what it hears of a prompt that is too long: it stops there, and scores what there is."""
            try:
                return await super().get_native_response(*args, **kwargs)
            except openai.BadRequestError as error:
                if error.code == "episode_over":
                    raise OverlongPromptError from error
                raise

        async def raise_from_native_response(self, response: Any) -> None:
            """Nothing: an answer without words is one that the rubric has to score, too."""

        async def from_native_response(self, response: Any) -> Any:
            """An answer without words and calls is an empty text, as rubrics expect one."""
            found = await super().from_native_response(response)
            if found.message.content is None and not found.message.tool_calls:
                found.message.content = ""
            return found

    # Waiting for the sampler takes as long as it takes; the proxy ends episodes that are late.
    return PolicyClient(openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None))


class ProxyCaller:
    """Requests of our own to the proxy, made by threads."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(4)
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    async def post(self, url: str, key: str, body: dict[str, Any]) -> Any:
        """The answer; None where it is empty. Raises OSError."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads, self._post, url, key, body)

    def _post(self, url: str, key: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
        request.add_header("Authorization", f"Bearer {key}")
        request.add_header("Content-Type", "application/json")
        with self.opener.open(request, timeout=NEXT_TIMEOUT_S) as answer:
            text = answer.read()
        return json.loads(text) if text else None


async def play_episode(environment: Any, assigned: dict[str, Any], caller: ProxyCaller) -> None:
    """One episode: verifiers plays it, and reports the result to the proxy."""
    url, key = assigned["base_url"], assigned["api_key"]
    client = policy_client(url, key)
    reward, error = None, None
    errors: list[str] = []
    rubric_errors.set(errors)
    try:
        row = {"example_id": 0, "seed": assigned["seed"], **assigned["row"]}
        played = await environment.run_rollout(row, client, assigned["model"], {})
        reward, failed = played.get("reward"), played.get("error")
        if failed is not None:
            error = str(failed.get("error_chain_repr") or failed)
        elif errors:
            error = errors[0]
    except Exception as problem:  # an environment is a program, with a program's errors
        error = f"{type(problem).__name__}: {problem}"
    finally:
        await client.close()
    await _tell_end(caller, url, key, reward, error)


async def _tell_end(
    caller: ProxyCaller, url: str, key: str, reward: float | None, error: str | None
) -> None:
    """Tell the proxy the episode's reward, or why there is none, and that it is over."""
    try:
        if error is None and reward is not None:
            try:
                await caller.post(f"{url}/rloo/reward", key, {"reward": float(reward)})
            except urllib.error.HTTPError as refused:  # such as one of NaN
                error = f"the reward {reward!r} was refused: {refused}"
        await caller.post(f"{url}/rloo/done", key, {} if error is None else {"error": error})
    except OSError as problem:  # the episode was ended meanwhile, which the run has noted
        print(f"an episode's end could not be reported: {problem}", file=sys.stderr)


async def play_episodes(environment: Any, url: str, token: str) -> None:
    """Play episodes of a run until this process is ended. The run offers agent.workers at once."""
    caller = ProxyCaller()
    tasks: set[asyncio.Task[None]] = set()
    while True:
        while (assigned := await _next_episode(caller, url, token)) is None:
            pass
        tasks.add(task := asyncio.create_task(play_episode(environment, assigned, caller)))
        task.add_done_callback(tasks.discard)


async def _next_episode(caller: ProxyCaller, url: str, token: str) -> Any:
    try:
        return await caller.post(f"{url}/rloo/next", token, {})
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise SystemExit("RLOO_TOKEN is not the token of the run") from None
        await asyncio.sleep(RETRY_S)
    except OSError:  # the run has not begun yet, or has ended
        await asyncio.sleep(RETRY_S)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="play_episodes.py")
    parser.add_argument("verb", choices=["data", "play"])
    parser.add_argument("id", help="what verifiers.load_environment takes")
    parser.add_argument("folder", nargs="?", help="data: where the files are written")
    parser.add_argument("--args", type=json.loads, default={}, help="JSON for load_environment")
    asked = parser.parse_args()
    token = os.environ.pop("RLOO_TOKEN", "")  # nothing that an environment starts needs it
    url = os.environ.get("RLOO_PROXY_URL", "").rstrip("/")
    if asked.verb == "data" and asked.folder is None:
        parser.error("data needs a folder")
    if asked.verb == "play" and not (url and token):
        parser.error("play needs RLOO_PROXY_URL and RLOO_TOKEN, which a run sets for its agent")
    environment = load_environment(asked.id, asked.args)
    if asked.verb == "data":
        print("\n".join(write_rows(environment, Path(asked.folder))))
    else:
        around = [os.environ.get("NO_PROXY"), urlsplit(url).hostname]
        os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(filter(None, around))
        asyncio.run(play_episodes(environment, url, token))


if __name__ == "__main__":
    main()
