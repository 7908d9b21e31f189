"""Sampling with images: completions have the log-probabilities of the model alone, and no image."""

import generation_cases as g
import pytest
import torch
import vision_cases as v

from rloo_cli.data import segments
from rloo_cli.policy.model import PlainSequence, Policy


@pytest.mark.slow_but(
    "qwen2_vl-auto", "qwen2_5_vl-False", "llava_next-auto", "smolvlm-auto", "internvl-False"
)
@pytest.mark.parametrize("shared", ["auto", False])
@pytest.mark.parametrize("name", v.FAMILY_NAMES)
def test_samples_have_the_log_probabilities_of_the_model_without_its_image_tokens(name, shared):
    model, vision = v.fresh(name)
    groups = v.groups(vision)
    source = g.generator(
        model, context=2048, tokens=vision.tokenizer, shared_prompt=shared, ignore_eos=True
    )
    source.generate(groups, [[1, 2, 3], [4], [5, 6]])
    policy = Policy(model, 1.0)
    for group in groups:
        for rollout in group.rollouts:
            ids = torch.tensor([group.prompt_ids + rollout.completion_ids])
            whole = ids if group.media is None else PlainSequence(ids, group.media)
            with torch.no_grad():
                logits = policy.call(whole, (), False)[0, len(group.prompt_ids) - 1 : -1].clone()
            logits[:, source.image_token_ids] = -torch.inf
            logp = segments.target_logprobs(logits, torch.tensor(rollout.completion_ids), 1.0)
            assert float((logp - torch.tensor(rollout.behaviour_logp)).abs().max()) < 1e-4
            assert vision.image_token_id not in rollout.completion_ids
