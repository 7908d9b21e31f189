"""`rloo fetch`: everything a run loads comes into the cache, and the run then needs no network."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from assert_refused import assert_refused
from cli_cases import Ended, Rloo
from hub_cases import Hub, Repositories, hub
from policy_cases import fresh

from rloo_cli.data.synthetic import tiny

WORDS = ("+recipe=smoke", "model.path=org/model", "data.path=org/data", "data.eval_split=test")
WORDS = (*WORDS, "data.max_prompt_length=32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a model, with two that must not be downloaded."""
    folder = tmp_path_factory.mktemp("model")
    fresh(vocab_size=len(tiny.tiny_tokenizer())).save_pretrained(folder)
    tiny.tiny_tokenizer().save_pretrained(folder)
    torch.save({"x": torch.zeros(1)}, folder / "pytorch_model.bin")
    (folder / "code.py").write_text("raise SystemExit\n")
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture
def repositories(model: dict[str, bytes]) -> Repositories:
    lines = [json.dumps({"prompt": f"p{i}", "answer": str(i)}) for i in range(12)]
    rows = "\n".join(lines).encode()
    data = {"train.jsonl": rows, "test.jsonl": rows}
    return {"models/org/model": dict(model), "datasets/org/data": data}


@pytest.fixture
def served(repositories: Repositories) -> Iterator[Hub]:
    with hub(repositories) as server:
        yield server


@pytest.fixture
def fetch(rloo: Rloo, served: Hub, tmp_path_factory: pytest.TempPathFactory):
    """`fetch(*words)` with a cache of its own, from the hub of this machine."""
    home = tmp_path_factory.mktemp("home")

    def run(*words: str, verb: str = "fetch", offline: bool = False, **variables: str) -> Ended:
        ours = {"HF_HOME": str(home), "HF_ENDPOINT": served.url, "HF_HUB_DISABLE_XET": "1"}
        ours |= {"HF_HUB_OFFLINE": str(int(offline)), "HF_HUB_DISABLE_TELEMETRY": "1"}
        return rloo.real(verb, *words, **(ours | variables))  # the hub's library reads them once

    run.home = home
    return run


@pytest.mark.slow
def test_what_was_fetched_trains_without_network(fetch, served: Hub, rloo: Rloo) -> None:
    ended = fetch(*WORDS)
    assert ended.code == 0, ended.said
    lines = [line.split() for line in ended.out.splitlines()]
    assert [line[0] for line in lines] == ["model.path", "data", "data.eval_split"]
    assert all(Path(line[-1]).exists() and str(fetch.home) in line[-1] for line in lines)
    names = {Path(p).name for p in served.asked}
    assert {"model.safetensors", "config.json", "tokenizer.json", "train.jsonl"} <= names
    assert not {"pytorch_model.bin", "code.py"} & names
    assert rloo.left() == []

    served.asked.clear()
    again = fetch(*WORDS)
    assert (again.code, again.out) == (0, ended.out)
    assert not [p for p in served.asked if p.endswith((".safetensors", ".jsonl"))]
    assert fetch(*WORDS, offline=True).out == ended.out

    served.status = 500  # and nothing may be asked of it
    trained = fetch(*WORDS, "max_steps=1", verb="train", offline=True)
    assert trained.code == 0, trained.said
    assert (rloo.folder / "runs" / "smoke" / "final" / "model.safetensors").exists()


@pytest.mark.slow
def test_what_is_made_is_made_and_what_lies_here_is_named(fetch, rloo: Rloo) -> None:
    (rloo.folder / "mine.jsonl").write_text('{"prompt": "a"}\n' * 8)
    ended = fetch("+recipe=smoke", "data.path=mine.jsonl", "data.eval_split=null")
    assert ended.code == 0, ended.said
    assert "make:tiny" in ended.out and "8 rows" in ended.out
    assert rloo.left() == ["mine.jsonl"]


def test_a_model_of_pickles_is_not_fetched(fetch, served: Hub, sentence) -> None:
    del served.repositories["models/org/model"]["model.safetensors"]
    ended = fetch("+recipe=smoke", "model.path=org/model")
    assert_refused(ended, 3, key="org/model")
    sentence(ended, folder=fetch.home)
    assert not [p for p in served.asked if p.endswith(".bin")]


def test_python_is_fetched_only_where_it_is_trusted(fetch, served: Hub) -> None:
    ended = fetch("+recipe=smoke", "model.path=org/model", "model.trust_remote_code=true")
    assert ended.code == 0, ended.said
    assert "models/org/model/code.py" in served.asked


def test_a_revision_is_fetched_under_its_name(fetch) -> None:
    ended = fetch("+recipe=smoke", "model.path=org/model", "model.revision=v1")
    assert ended.code == 0, ended.said
    assert (fetch.home / "hub" / "models--org--model" / "refs" / "v1").exists()


def test_everything_that_cannot_be_had_is_named_with_what_to_do(fetch) -> None:
    ended = fetch("+recipe=smoke", "model.path=org/nothing", "model.ref_path=org/model2")
    assert "Traceback" not in ended.said
    for key, name in (("model.path", "org/nothing"), ("model.ref_path", "org/model2")):
        problem = assert_refused(ended, 3, f"{key} = '{name}'", fix="rloo fetch +recipe=smoke")
        assert f"{fetch.home}/hub" in problem.why and "HF_HOME" in problem.fix


def test_a_gated_model_is_answered_with_the_terms(fetch, served: Hub) -> None:
    served.gated = True
    ended = fetch("+recipe=smoke", "model.path=org/model")
    assert_refused(ended, 3, "org/model is gated", fix="https://huggingface.co/org/model")


@pytest.mark.slow
def test_without_network_what_was_searched_is_said(fetch, served: Hub) -> None:
    served.shutdown()
    served.server_close()  # the port answers no more
    words = ("+recipe=smoke", "model.path=org/model")
    for offline, said in ((False, "Connect"), (True, "HF_HUB_OFFLINE")):
        ended = fetch(*words, offline=offline)
        assert "Traceback" not in ended.said
        problem = assert_refused(ended, 3, fix="rloo fetch +recipe=smoke model.path=org/model")
        assert said in problem.why and f"{fetch.home}/hub" in problem.why


def test_a_run_without_network_is_refused_at_once_with_the_line_to_fetch_it(
    fetch, rloo_without_torch: Rloo
) -> None:
    ours = {"HF_HOME": str(fetch.home), "HF_HUB_OFFLINE": "1"}
    words = ("+recipe=tldr_1b", "algorithm.beta=0.1")
    ended = rloo_without_torch("train", *words, **ours)
    assert ended.code == 3 and rloo_without_torch.left() == []
    whole = "fix      on a machine with network: rloo fetch +recipe=tldr_1b algorithm.beta=0.1\n"
    assert (ended.err + "\n").count(whole) == 3  # model, data and reward model
    assert (
        rloo_without_torch("train", *words, "--dry-run", **ours).code == 0
    )  # a plan loads nothing


@pytest.mark.parametrize("words", [(), ("--dry-run",)], ids=["nothing", "a flag"])
def test_fetch_says_what_it_takes(words: tuple[str, ...], fetch) -> None:
    ended = fetch(*words)
    assert ended.code == 2 and "rloo fetch +recipe=NAME" in ended.err


def test_nothing_is_fetched_for_a_config_that_is_wrong(fetch, served: Hub) -> None:
    assert fetch(*WORDS, "algorithm.beta=abc").code == 2
    assert served.asked == []
