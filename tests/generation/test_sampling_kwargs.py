"""generation.kwargs: sampling arguments by the backend's own names; and model.init_kwargs."""

import pytest
import torch
from assert_refused import assert_refused

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.generation.hf.sampling import logits_processors
from rloo_cli.generation.vllm.sampling_params import completion_params
from rloo_cli.policy.load import load_causal_lm, read_max_positions
from rloo_cli.utils.errors import ConfigError

OFF = "algorithm.correction.mode=none"


def settings(*words: str):
    return check.check_config(compose_config(["+recipe=smoke", *words]))


def probabilities(greedy: bool, **kwargs: object) -> torch.Tensor:
    """Of five tokens that are equally likely, the first a little more. (5,)"""
    text = str(kwargs).replace("'", "")
    config = settings(f"generation.kwargs={text}").generation
    process = logits_processors(config, {0}, 1, greedy)
    return process(torch.tensor([[3]]), torch.tensor([[0.1, 0.0, 0.0, 0.0, -9.0]])).softmax(-1)[0]


def test_kwargs_of_transformers_bend_what_is_sampled():
    assert probabilities(False, suppress_tokens=[1, 2])[1:3].tolist() == [0.0, 0.0]
    assert probabilities(True, suppress_tokens=[0])[0] == 0  # greedy answers, too
    assert probabilities(False, bad_words_ids=[[2]])[2] == 0
    assert probabilities(False, bad_words_ids=[[3, 2]])[2] == 0  # behind a 3 alone
    assert probabilities(False, bad_words_ids=[[4, 2]])[2] > 0
    assert probabilities(False, epsilon_cutoff=0.01)[4] == 0
    assert probabilities(True, epsilon_cutoff=0.01)[4] > 0  # a filter: greedy needs none
    assert (probabilities(False) > 0).all()


def test_kwargs_of_vllm_are_sent_with_each_completion():
    words = ["generation=vllm_colocate", "generation.kwargs={presence_penalty: 0.5}", OFF]
    sent = completion_params(settings(*words).generation, [0], 7, False, None)
    assert sent["presence_penalty"] == 0.5


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["generation.kwargs={num_beams: 4}"], "num_beams"),
        (["generation=vllm_colocate", "generation.kwargs={top_p: 0.5}", OFF], "generation.top_p"),
        (["generation=vllm_server", "generation.kwargs={logprobs: 5}", OFF], "logprobs"),
        (["generation=vllm_server", "generation.kwargs={best_of: 1}"], "best_of"),
        (["model.init_kwargs={dtype: float32}"], "model.dtype"),
        (["generation=vllm_server", "model.init_kwargs={rope_theta: 5.0}"], "hf_overrides"),
    ],
    ids=["beams", "top_p", "logprobs", "corrected", "dtype", "vllm"],
)  # fmt: skip
def test_names_that_have_a_key_or_no_meaning_are_refused(words, key, sentence):
    with pytest.raises(ConfigError) as refused:
        settings(*words)
    assert_refused(refused, 2, key)
    sentence(refused)


def test_init_kwargs_reach_the_model_and_its_context():
    model = settings("model.init_kwargs={max_position_embeddings: 77, use_cache: false}").model
    loaded = load_causal_lm(model, model.path, torch.device("cpu"))
    assert loaded.config.max_position_embeddings == 77
    assert read_max_positions(model) == 77
    got = "generation.server.extra={hf_overrides: {rope_theta: 5.0}}"
    settings("generation=vllm_server", "model.init_kwargs={rope_theta: 5.0}", got)
