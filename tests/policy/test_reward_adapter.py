"""A reward model that is an adapter scores as peft's own model does, whatever kind it is."""

from pathlib import Path
from typing import Any

import peft
import pytest
import reward_model_cases as cases
import torch
import transformers
from assert_refused import assert_refused

from rloo_cli.planning import model_spec
from rloo_cli.policy import reward_adapter, reward_load
from rloo_cli.rewards import model as reward_model
from rloo_cli.utils.errors import MachineError

COMMON: dict[str, Any] = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
KINDS = {
    "LoRA": lambda: peft.LoraConfig(r=4, target_modules="all-linear", **COMMON),
    "DoRA": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, **COMMON),
    "IA3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **COMMON
    ),
    "LoHa": lambda: peft.LoHaConfig(r=4, target_modules=["q_proj", "v_proj"], **COMMON),
}
IDS = torch.arange(10, 40)[None]


def base(folder: Path) -> Path:
    """A language model, without a score head."""
    torch.manual_seed(1)
    config = cases.FAMILIES["qwen3"]()
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    return folder / "base"


def adapted(folder: Path, config: Any, stir: bool = True) -> tuple[Path, Any]:
    """An adapter over `base`, moved away from nothing: its folder, and peft's model."""
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    under = load(base(folder), num_labels=1)
    under.config.pad_token_id = 0
    model = peft.get_peft_model(under, config)
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters() if stir else ():
            if weight.requires_grad:
                weight += 0.2 * torch.randn_like(weight)
    model.save_pretrained(folder / "adapter")
    return folder / "adapter", model.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_merged_and_scores_as_peft_does(tmp_path: Path, kind: str) -> None:
    folder, theirs = adapted(tmp_path, KINDS[kind]())
    reward_model.preflight(cases.settings(folder))
    scorer = reward_load.load_reward_model(
        "reward.rm", cases.settings(folder), cases.tokenizer(), torch.device("cpu")
    )
    with torch.no_grad():
        ours, expected = scorer.model(IDS).logits, theirs(IDS).logits
        bare = transformers.AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "base", num_labels=1
        )(IDS).logits
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert (ours - bare).abs() > 1e-3
    assert not [n for n, _ in scorer.model.named_parameters() if "lora" in n or "ia3" in n]


def test_an_adapter_without_a_head_is_refused_as_its_scores_would_be_random(
    tmp_path: Path, sentence
) -> None:
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = transformers.AutoModelForCausalLM.from_pretrained(base(tmp_path))
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(MachineError) as caught:
        reward_load.load_reward_model(
            "reward.rm", cases.settings(tmp_path / "adapter"), cases.tokenizer(),
            torch.device("cpu"),
        )  # fmt: skip
    assert_refused(caught, 3, "score", fix="modules_to_save: [score]")
    sentence(caught)


def test_an_adapter_of_prompts_is_refused_with_its_kind(tmp_path: Path) -> None:
    config = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="SEQ_CLS")
    folder, _ = adapted(tmp_path, config, stir=False)
    with pytest.raises(MachineError, match="PROMPT_TUNING"):
        reward_adapter.load_merged_classifier(folder, "reward.rm", {})


def test_a_plan_takes_the_base_of_an_adapter(tmp_path: Path) -> None:
    folder, _ = adapted(tmp_path, KINDS["LoRA"]())
    one, two = (model_spec.load_model_spec(str(p)) for p in (folder, tmp_path / "base"))
    assert one.total_params == two.total_params
