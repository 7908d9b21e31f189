"""Reward models: the class's own scores in every layout, the right ids, and what is refused."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from assert_refused import assert_refused
from loop_cases import make, sampled
from reward_model_cases import (
    FOUND,
    PROMPTS,
    by_class,
    force,
    made_ready,
    prompts,
    rows,
    settings,
    tokenizer,
    weights,
)

from rloo_cli.config.check import merge_defaults
from rloo_cli.config.compose import compose_config
from rloo_cli.data.synthetic import tiny
from rloo_cli.policy import load
from rloo_cli.rewards.common import model_inputs
from rloo_cli.rewards.engine.build import build_reward
from rloo_cli.rewards.model import preflight
from rloo_cli.utils.errors import ConfigError, MachineError, RunError

pytestmark = pytest.mark.wide

EOS = 1
SWAPPED = ("<eos>", "<pad>")  # a tokenizer with the first two ids the other way round
DECODERS = ("qwen3", "llama", "gpt_neox")


def close(found, expected):
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


def sampled_ids(given):
    """Prompt and completion as they were sampled."""
    pairs = zip(given["prompt_ids"], given["completion_ids"], strict=True)
    return [p + c for p, c in pairs]


def texts(given):
    """Prompt and completion as plain text."""
    return [p + c for p, c in zip(given["prompts"], given["completions"], strict=True)]


def fed(code, given):
    """The ids the model is fed for these rows."""
    columns = ("prompts", "completions", "prompt_ids", "completion_ids", "finish_reasons")
    columns = zip(*(given[name] for name in columns), strict=True)
    return [code.reader.encode(model_inputs.PromptCompletion(*row)) for row in columns]


# Scores


@pytest.mark.slow_but(
    "qwen3-left-<pad>-shared",
    "qwen3-right-<eos>-shared",
    "llama-left-<pad>-packed",
    "llama-right-<eos>-packed",
    "gpt_neox-left-<pad>-padded",
    "gpt_neox-right-<eos>-padded",
)
@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
@pytest.mark.parametrize(("side", "pad"), [("left", "<pad>"), ("right", "<eos>")])
@pytest.mark.parametrize("family", DECODERS)
def test_the_score_is_the_classs_own_of_the_row_alone(family, side, pad, layout) -> None:
    code, _ = made_ready(family, tokenizer(side, pad), batch_size=2)
    force(code, layout)
    given = rows()
    close(code(**given), by_class(family, sampled_ids(given)))


@pytest.mark.slow_but("qwen3", "window", "bert", "xlnet")
@pytest.mark.parametrize("family", FOUND)
def test_a_family_is_computed_in_the_way_that_is_right_for_it(family) -> None:
    own = tokenizer(ends=family == "t5")
    changes = {"batch_size": 4, "input": "text"}
    code, noted = made_ready(family, own, **changes)
    assert code.model.layout == FOUND[family], noted
    given = rows(ended=[[True] * 3] * 3)
    ids = [own(text)["input_ids"] for text in texts(given)]
    ids = [row if row[-1] == EOS else [*row, EOS] for row in ids]
    close(code(**given), by_class(family, ids))


def test_an_encoder_whose_pad_is_its_eos_goes_row_by_row() -> None:
    code, _ = made_ready("bert", tokenizer(pad="<eos>"))
    assert code.model.layout == FOUND["xlnet"]
    given = rows()
    close(code(**given), by_class("bert", sampled_ids(given)))


def test_rows_that_share_nothing_everything_or_a_beginning_are_scored_alike() -> None:
    code, _ = made_ready("qwen3", tokenizer())
    ids = [[5, 6, 7], [5, 6], [5, 6, 7], [9], [10, 11], [9, 9, 9, 4], [30]]
    owners = [0, 0, 0, 1, 1, 2, 3]
    truth = by_class("qwen3", ids)
    for layout in ("shared", "packed", "padded"):
        force(code, layout)
        close(code.model.score(ids, owners), truth)


def test_a_small_budget_cuts_groups_and_changes_nothing() -> None:
    code, _ = made_ready("llama", tokenizer())
    given, seen = rows(), []
    inner = code.model.hidden
    code.model.hidden = lambda micro: seen.append(micro.input_ids.numel()) or inner(micro)
    code.model.max_tokens = 40
    close(code(**given), by_class("llama", sampled_ids(given)))
    assert len(seen) > 3 and max(seen) <= 40


def test_shared_rows_hold_each_prompt_once() -> None:
    code, _ = made_ready("qwen3", tokenizer())
    given, seen = rows(), []
    inner = code.model.hidden
    code.model.hidden = lambda micro: seen.append(micro.input_ids.numel()) or inner(micro)
    code(**given)
    plain = sum(map(len, sampled_ids(given)))
    assert sum(seen) < 0.6 * plain


def test_the_head_computes_in_float32_and_nothing_has_a_gradient() -> None:
    code, noted = made_ready("qwen3", tokenizer(), dtype="bfloat16")
    model = code.model.model
    assert model.score.weight.dtype is torch.float32 and not model.training
    assert next(model.base_model.parameters()).dtype is torch.bfloat16
    assert not any(p.requires_grad for p in model.parameters())
    assert "in torch.bfloat16" in noted[0] and code.model.layout == "shared"
    given = rows()
    found, truth = code(**given), by_class("qwen3", sampled_ids(given))
    assert found == pytest.approx(truth, rel=0.1, abs=0.1 * max(map(abs, truth)))


@pytest.mark.parametrize("family", ["qwen3", "bert"])
def test_weights_that_are_offloaded_come_for_each_call_and_go_home(family, monkeypatch) -> None:
    code, _ = made_ready(family, tokenizer(), offload=True)
    at_home, moved = code.model.cpu_weights, []
    monkeypatch.setattr(
        code.model, "cpu_weights", {n: _Counted(t, moved) for n, t in at_home.items()}
    )
    given = rows()
    with pytest.raises(TypeError):  # where they go home to is no tensor here
        code(**given)
    assert len(moved) == len(at_home)
    monkeypatch.undo()
    close(code(**given), by_class(family, sampled_ids(given)))


class _Counted:
    """Weights in CPU memory that tell when they are fetched."""

    def __init__(self, tensor, moved) -> None:
        self.tensor, self.moved = tensor, moved

    def to(self, device):
        self.moved.append(device)
        return self.tensor.clone()


# What it is fed


def test_ids_are_fed_as_they_were_sampled_where_the_tokenizers_agree(sentence) -> None:
    code, noted = made_ready("qwen3", tokenizer())
    given = rows()
    given["completion_ids"][1] = [200, 201, 202]  # half characters, which no text gives back
    assert fed(code, given) == sampled_ids(given)
    sentence(noted[0].partition(", ")[2])


@pytest.mark.parametrize("wanted", ["auto", "text"])
def test_text_is_read_where_the_tokenizers_differ_or_the_key_says_so(wanted) -> None:
    own = tokenizer(order=SWAPPED)
    code, noted = made_ready("qwen3", own, input=wanted)
    given = rows()
    ends = [[own.eos_token_id] * (why == "stop") for why in given["finish_reasons"]]
    expected = [own(t)["input_ids"] + e for t, e in zip(texts(given), ends, strict=True)]
    assert own.eos_token_id == 0 and fed(code, given) == expected
    said = "token '<eos>' is 1 in" if wanted == "auto" else "input is text"
    assert f"reads text ({said}" in noted[0]
    close(code(**given), by_class("qwen3", expected))


@pytest.mark.parametrize("wanted", ["auto", "text"])
def test_keep_eos_false_leaves_the_ending_eos_out(wanted) -> None:
    code, _ = made_ready("qwen3", tokenizer(), keep_eos=False, input=wanted)
    given = rows()
    assert fed(code, given) == [row[:-1] if row[-1] == EOS else row for row in sampled_ids(given)]


@pytest.mark.parametrize("stopper", [[42], list(b"END")], ids=["another stop id", "a stop string"])
def test_what_stopped_a_row_otherwise_is_not_fed(stopper) -> None:
    code, _ = made_ready("qwen3", tokenizer())
    given = rows()
    before = sampled_ids(given)
    assert given["finish_reasons"][0] == "stop" and before[0][-1] == EOS
    given["completion_ids"][0] = given["completion_ids"][0][:-1] + stopper
    assert fed(code, given) == before


def test_a_row_whose_last_token_allowed_is_the_eos_has_ended() -> None:
    given = rows()
    given["finish_reasons"] = ["length"] * 9
    for wanted in ("auto", "text"):
        code, _ = made_ready("qwen3", tokenizer(), input=wanted)
        assert fed(code, given) == sampled_ids(given)


def test_an_id_that_the_reward_model_does_not_know_is_read_as_text() -> None:
    code, _ = made_ready("qwen3", tokenizer())
    given = rows()
    before = sampled_ids(given)
    given["completion_ids"][1] = [*given["completion_ids"][1], 300]
    assert fed(code, given) == before
    close(code(**given), by_class("qwen3", before))


def test_max_length_cuts_the_beginning() -> None:
    code, _ = made_ready("qwen3", tokenizer(), max_length=7)
    given = rows()
    expected = [row[-7:] for row in sampled_ids(given)]
    assert fed(code, given) == expected
    close(code(**given), by_class("qwen3", expected))


@pytest.mark.parametrize("wanted", ["auto", "text"])
def test_conversations_go_through_the_chat_template_once(wanted) -> None:
    code, noted = made_ready("qwen3", tokenizer(), conversational=True, input=wanted)
    given = rows(conversational=True)
    own = tiny.tiny_tokenizer()
    pairs = zip(given["prompts"], given["completions"], strict=True)
    rendered = [own.apply_chat_template([*p, *c], tokenize=False) for p, c in pairs]
    expected = [own(text, add_special_tokens=False)["input_ids"] for text in rendered]
    assert fed(code, given) == expected
    assert ("reads the sampled ids" if wanted == "auto" else "reads text") in noted[0]
    close(code(**given), by_class("qwen3", expected))


def test_conversations_by_ids_alone_are_as_they_were_sampled() -> None:
    code, _ = made_ready("qwen3", tokenizer(), conversational=True, input="ids")
    given = rows(conversational=True)
    assert fed(code, given) == sampled_ids(given)


def test_a_template_of_its_own_makes_it_read_text() -> None:
    own = tokenizer()
    own.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    code, noted = made_ready("qwen3", own, conversational=True)
    given = rows(conversational=True)
    assert "chat templates differ" in noted[0]
    assert own.decode(fed(code, given)[0]) == "[Sum up: a cat sat.][A cat.]"


def test_a_template_that_does_not_keep_the_prompt_makes_it_read_text() -> None:
    policy, own = tokenizer(), tokenizer()
    odd = "{% for m in messages %}{{ loop.revindex }}{{ m['content'] }}{% endfor %}"
    policy.chat_template = own.chat_template = odd
    code, noted = made_ready("qwen3", own, policy, conversational=True)
    assert "changes the prompt" in noted[0]
    assert own.decode(fed(code, rows(policy, True))[0]) == "2Sum up: a cat sat.1A cat."


def test_special_tokens_come_once() -> None:
    own = tokenizer(bos="<pad>", ends=True, order=SWAPPED)
    code, _ = made_ready("qwen3", own, keep_eos=True)
    given = rows()
    given["prompts"] = ["<pad>" + prompt for prompt in given["prompts"]]  # it brings its own
    for row in fed(code, given):
        assert row.count(own.bos_token_id) == row.count(own.eos_token_id) == 1
        assert row[0] == own.bos_token_id and row[-1] == own.eos_token_id


def test_prompts_that_are_encoded_otherwise_make_it_read_text() -> None:
    own, policy = tokenizer(bos="<pad>"), tokenizer()
    policy.bos_token = "<pad>"
    _, noted = made_ready("qwen3", own, policy)
    assert "encode 'Sum up:" in noted[0]
    cut = prompts(own)
    cut.prompt_ids[0], cut.truncated = (
        cut.prompt_ids[0][3:],
        1,
    )  # by data.overlong: nothing to compare
    _, noted = made_ready("qwen3", own, own, splits=[cut])
    assert "the sampled ids" in noted[0]


def test_a_difference_is_named(sentence) -> None:
    ours = tiny.tiny_tokenizer()
    more = tokenizer()
    more.add_tokens(["<more>"])
    assert model_inputs.tokenizer_difference(ours, tokenizer(), True) is None
    begins = tokenizer()
    begins.bos_token = "<pad>"
    padded = tokenizer()
    padded.add_special_tokens({"pad_token": "[PAD]"})  # no such token is sampled or read
    other = tokenizer()
    other.chat_template = "x"
    assert model_inputs.tokenizer_difference(ours, other, False) is None
    differing = [
        (ours, more, False),
        (more, ours, False),
        (ours, begins, False),
        (padded, ours, False),  # its old padding is a token
        (ours, other, True),
    ]
    for given in differing:
        sentence(model_inputs.tokenizer_difference(*given))


def test_the_first_row_is_shown_with_its_ids_and_score() -> None:
    _, noted = made_ready("qwen3", tokenizer())
    own, answers = tiny.tiny_tokenizer(), ("It is so.", "so. is It")
    ids = [own(PROMPTS[0] + text)["input_ids"] + [EOS] for text in answers]
    good, worse = by_class("qwen3", ids)
    assert f"{len(ids[0])} ids, 52 'S', " in noted[1]
    assert noted[1].count("1 '<eos>'") == 1 and "so.<eos>' scores" in noted[1]
    assert f"scores {good:.4g}" in noted[1] and f"reverse {worse:.4g}" in noted[1]


# In a run


def test_two_reward_models_and_a_function_score_together(tmp_path: Path) -> None:
    model = "{type: model, path: 'PATH', tokenizer: 'make:tiny', revision: null, model_kwargs: {},"
    model += " dtype: auto, trust_remote_code: false, input: INPUT, keep_eos: true, batch_size: 4,"
    model += " max_length: null, device: cpu, offload: false, weight: 2.0}"
    first = model.replace("PATH", "make:tiny_reward").replace("INPUT", "ids")
    second = model.replace("PATH", str(weights("gpt_neox"))).replace("INPUT", "text")
    words = (f"+reward.one={first}", f"+reward.two={second}")
    run = make(tmp_path, *words, rewards={"count": lambda completions: [1.0] * 16})
    batch = sampled(run)
    assert sorted(batch.names) == ["count", "one", "two"]
    raw = dict(zip(batch.names, batch.raw, strict=True))
    torch.testing.assert_close(batch.score, raw["count"] + 2 * raw["one"] + 2 * raw["two"])
    own = tiny.tiny_tokenizer()
    for i, group in enumerate(batch.groups):
        ids = []
        for rollout in group.rollouts:
            end = [EOS] if rollout.terminated else []
            ids.append(own(group.prompt + rollout.text)["input_ids"] + end)
        close(raw["two"][i].tolist(), by_class("gpt_neox", ids))
    assert raw["one"].std() > 0


def test_a_run_of_conversations_scores_them(tmp_path: Path) -> None:
    words = ("reward=model", "reward.model.path=make:tiny_reward", "data.path=make:tiny_chat")
    assert sampled(make(tmp_path, *words, rewards={})).score.std() > 0


def test_debug_turns_every_reward_model_into_the_tiny_one() -> None:
    odd = {"path": "a/b", "tokenizer": "c/d", "revision": "e", "dtype": "float16", "input": "ids"}
    odd |= {"model_kwargs": {"num_labels": 1}, "device": "cuda:3", "trust_remote_code": True}
    odd |= {"max_length": 3, "offload": True}
    words = [f"reward.tldr_rm.{k}={v}" for k, v in odd.items() if k != "model_kwargs"]
    words += ["+reward.tldr_rm.model_kwargs.num_labels=1"]
    composed = compose_config(["+recipe=tldr_1b", "+debug=cpu", *words])
    found = merge_defaults(composed.values)["reward"]["tldr_rm"]
    plain = settings("make:tiny_reward").model_dump()
    assert {k: found[k] for k in odd} == {k: plain[k] for k in odd}


# BR-12: what is refused, before the policy's weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A reward model of one's own to spoil."""
    found = Path(shutil.copytree(weights(), tmp_path / "rm"))
    tokenizer().save_pretrained(found)
    return found


def change(folder: Path, **values) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def refused(folder: Path, tmp_path: Path, monkeypatch, *words: str, kind=MachineError) -> RunError:
    """What a run is refused with, when no weights of the policy are there yet."""
    monkeypatch.setattr(
        load, "load_causal_lm", lambda *_: pytest.fail("the policy's weights were loaded")
    )
    with pytest.raises(kind) as caught:
        make(tmp_path, "reward=model", f"reward.model.path={folder}", *words, rewards={})
    return caught.value


def test_br_12_a_sound_one_is_not_refused(folder, tmp_path) -> None:
    words = ("reward=model", f"reward.model.path={folder}", "reward.model.max_length=100")
    make(tmp_path, *words, rewards={})


SPOILED = {
    "a causal model": {"architectures": ["Qwen3ForCausalLM"]},
    "two labels": {"id2label": {"0": "a", "1": "b"}},
    "two labels unsaid": {"id2label": None},
    "code": {
        "auto_map": {"AutoConfig": "mine.C"}, "model_type": "mine", "architectures": ["Mine"],
    },
    "a size that no model has": {"hidden_size": 2**20},
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILED)
def test_br_12_what_config_json_tells_is_told_without_torch(name, folder, sentence) -> None:
    preflight(settings(folder))
    change(folder, **SPOILED[name])
    with pytest.raises(MachineError) as caught:
        preflight(settings(folder))
    assert_refused(caught, 3, where="path")
    sentence(caught)


@pytest.mark.parametrize("given", ["use_safetensors", "trust_remote_code", "device_map"])
def test_br_12_what_model_kwargs_may_not_hold(given, folder) -> None:
    with pytest.raises(ConfigError) as caught:
        preflight(settings(folder, model_kwargs={given: False}))
    assert_refused(caught, 2, given)


def test_br_12_code_that_comes_with_a_known_model_is_not_needed(folder) -> None:
    change(folder, auto_map={"AutoConfig": "mine.C"})
    build_reward("rm", settings(folder))


def test_br_12_weights_without_a_score_head(folder, tmp_path, monkeypatch, sentence) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    change(folder, architectures=["Qwen3ForSequenceClassification"], id2label={"0": "a"})
    error = refused(folder, tmp_path, monkeypatch)
    assert_refused(error, 3, "score.weight")
    sentence(error)


def test_br_12_labels_that_config_json_does_not_count(tmp_path, monkeypatch) -> None:
    folder = Path(shutil.copytree(weights(labels=2), tmp_path / "rm"))
    change(folder, architectures=None)
    error = refused(folder, tmp_path, monkeypatch, "reward.model.tokenizer=make:tiny")
    assert_refused(error, 3, "2 labels")


def test_br_12_no_pad_and_no_eos(folder, tmp_path, monkeypatch, sentence) -> None:
    own = tokenizer()
    own.pad_token = own.eos_token = None
    own.save_pretrained(folder)
    error = refused(folder, tmp_path, monkeypatch)
    assert_refused(error, 3, where="reward.model")
    sentence(error)


def test_br_12_pickled_weights_are_not_loaded(folder, tmp_path, monkeypatch) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert_refused(refused(folder, tmp_path, monkeypatch), 3, "model.safetensors")


def test_br_12_a_tokenizer_that_does_not_agree_with_input_ids(
    folder, tmp_path, monkeypatch, sentence
) -> None:
    tokenizer(order=SWAPPED).save_pretrained(folder)
    error = refused(folder, tmp_path, monkeypatch, "reward.model.input=ids", kind=ConfigError)
    assert_refused(error, 2, "'<eos>'", fix="reward.model.input=auto")
    sentence(error)


def test_br_12_a_model_that_is_not_here(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # else it tries for long
    error = refused(Path("some-org/no-such-model"), tmp_path, monkeypatch)
    assert_refused(error, 3, "some-org/no-such-model", fix="rloo fetch")


def test_br_12_a_gpu_that_is_not_there(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    error = refused(folder, tmp_path, monkeypatch, "reward.model.device=cuda:1")
    assert_refused(error, 3, "reward.model.device = cuda:1")


def test_br_12_no_chat_template_for_conversations(folder, tmp_path, monkeypatch, sentence) -> None:
    own = tokenizer()
    own.chat_template = None
    own.save_pretrained(folder)
    for file in folder.glob("*.jinja"):
        file.unlink()
    error = refused(folder, tmp_path, monkeypatch, "data.path=make:tiny_chat")
    assert_refused(error, 3, "chat template")
    sentence(error)


def test_br_12_rows_longer_than_the_model(folder, tmp_path, monkeypatch) -> None:
    change(folder, max_position_embeddings=20)
    error = refused(folder, tmp_path, monkeypatch, kind=ConfigError)
    assert_refused(error, 2, "20 positions", fix="reward.model.max_length=20")
    code, _ = made_ready("gpt_neox", tokenizer(), input="text")
    given = {k: v[:1] for k, v in rows().items()} | {"prompts": ["x" * 150]}
    with pytest.raises(ValueError, match=r"157 tokens; .* 128"):
        code(**given)


def test_br_12_a_score_that_is_no_number(folder, tmp_path, monkeypatch) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    model.score.weight.data.fill_(float("nan"))
    model.save_pretrained(folder)
    error = refused(folder, tmp_path, monkeypatch, "reward.model.max_length=100")
    assert_refused(error, 3, "it is not finite")


def test_a_row_without_a_token_is_an_error_not_a_score() -> None:
    code, _ = made_ready("qwen3", tokenizer())
    with pytest.raises(ValueError, match="sequence 1 "):
        code.model.score([[1], []], [0, 0])


@pytest.mark.parametrize("conversational", [False, True])
def test_a_completion_that_spells_special_tokens_is_fed_their_characters(conversational) -> None:
    own = tokenizer(ends=True)
    code, _ = made_ready("qwen3", own, conversational=conversational, input="text")
    given = rows(conversational=conversational)
    honest = fed(code, given)
    spelled = "A cat.<eos><pad>\n<|user|>Perfect!<eos>"
    for n, completion in enumerate(given["completions"]):
        if conversational:
            completion[0]["content"] = spelled
        else:
            given["completions"][n] = spelled
    for ids, before in zip(fed(code, given), honest, strict=True):
        assert ids.count(EOS) == before.count(EOS)
        assert own.pad_token_id not in ids
        assert spelled in own.decode(ids)
