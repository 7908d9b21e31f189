"""Which models may compute a shared prompt with our own attention, read off config and classes."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from family_cases import GROUPED, HEADS, OPT, PASSES, REFUSED, TWO, T
from policy_cases import SHORT

from rloo_cli.policy import layout_support, load


def make(config, dropout=False):
    """On no device: reading needs no weights."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    if not dropout:
        load.zero_dropout(model)
    return model


@pytest.mark.parametrize("name", PASSES)
def test_families_of_plain_causal_attention_pass(name):
    assert layout_support.why_not_shared(make(PASSES[name]())) is None


@pytest.mark.parametrize("name", REFUSED)
def test_every_other_family_is_refused_and_told_why(name):
    config, reason = REFUSED[name]
    assert reason in layout_support.why_not_shared(make(config()))


def test_a_window_that_holds_every_row_does_nothing():
    for config in (
        T.MistralConfig(**GROUPED, sliding_window=12),
        T.Olmo3Config(**GROUPED, sliding_window=12, **TWO),
        T.Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=12, max_window_layers=1),
    ):
        model = make(config)
        assert layout_support.why_not_shared(model, 12) is None
        assert "window of 12" in layout_support.why_not_shared(model, 13)
        assert "window of 12" in layout_support.why_not_shared(model)


def test_a_window_no_layer_has_does_not_count():
    config = T.Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=5, max_window_layers=2
    )
    assert layout_support.why_not_shared(make(config)) is None
    plain = make(T.LlamaConfig(**GROUPED))
    plain.config.sliding_window, plain.config.use_sliding_window = 5, False
    assert layout_support.why_not_shared(plain) is None
    plain.config.use_sliding_window = True
    assert "window of 5" in layout_support.why_not_shared(plain)


def test_caps_and_sinks_are_found_behind_a_window_that_does_nothing():
    assert "soft-capped" in layout_support.why_not_shared(make(T.Gemma2Config(**HEADS)), 64)
    config = T.GptOssConfig(**HEADS, num_local_experts=2, num_experts_per_tok=1)
    assert layout_support.why_not_shared(make(config), 64) == "attention sinks"


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (lambda: T.GPT2Config(**SHORT), "dropout of 0.1"),
        (lambda: T.OPTConfig(**OPT), "dropout = 0.1"),
        (lambda: T.LlamaConfig(**GROUPED, attention_dropout=0.25), "attention_dropout = 0.25"),
    ],
)
def test_dropout_is_refused_until_it_is_set_to_0(config, name):
    model = make(config(), dropout=True)
    assert name in layout_support.why_not_shared(model)
    assert layout_support.why_not_shared(model, training=False) is None
    load.zero_dropout(model)
    assert layout_support.why_not_shared(model) is None


def test_a_classifiers_dropout_is_no_language_models():
    model = make(T.LlamaConfig(**GROUPED))
    model.config.classifier_dropout = model.config.summary_first_dropout = 0.1
    assert layout_support.why_not_shared(model) is None


def test_adapters_that_add_to_the_prompt_are_refused_and_others_are_not():
    model = make(T.LlamaConfig(**GROUPED))
    kinds = {
        "PREFIX_TUNING": SimpleNamespace(is_prompt_learning=True, peft_type="PREFIX_TUNING"),
        "ADAPTION_PROMPT": SimpleNamespace(
            is_prompt_learning=False, is_adaption_prompt=True, peft_type="ADAPTION_PROMPT"
        ),
    }
    for name, adapter in kinds.items():
        model.peft_config = {"default": adapter}
        assert name in layout_support.why_not_shared(model)
    model.peft_config = {"default": SimpleNamespace(is_prompt_learning=False, peft_type="LORA")}
    assert layout_support.why_not_shared(model) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_encoder_decoder": True}, "an encoder"),
        ({"add_cross_attention": True}, "an encoder"),
        ({"sub_configs": {"vision_config": object}, "vision_config": object()}, "vision_config"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}, "mrope"),
        ({"use_bidirectional_attention": True}, "not causal"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "unknown size"),
        ({"attention_logit_cap": 30.0}, "attention_logit_cap = 30.0"),
    ],
)
def test_what_a_config_says_of_inputs_and_layers_is_heard(changes, reason):
    model = make(T.LlamaConfig(**GROUPED))
    for key, value in changes.items():
        vars(model.config)[key] = value  # past the checks of transformers, which differ by version
    if "sub_configs" in changes:  # the class tells it, as a property from transformers 5.20 on
        model.config.__class__ = type("Config", (type(model.config),), changes)
    assert reason in layout_support.why_not_shared(model)


def test_attention_both_ways_and_what_is_no_transformers_model_are_refused():
    model = make(T.LlamaConfig(**GROUPED))
    model.model.layers[1].self_attn.is_causal = False
    assert "not causal" in layout_support.why_not_shared(model)
    plain = torch.nn.Linear(1, 1)
    plain.config = model.config
    assert "not a transformers model" in layout_support.why_not_shared(plain)


def test_image_models_of_unknown_families_are_refused():
    text = GROUPED | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
    config = T.Qwen2VLConfig(
        text_config=text, vision_config={"depth": 1, "embed_dim": 16, "num_heads": 2}
    )
    with torch.device("meta"):
        model = T.Qwen2VLForConditionalGeneration(config)
    load.zero_dropout(model)
    assert layout_support.why_not_shared(model) is None
    model.config.model_type = "some_other_vl"
    assert "beside a text model" in layout_support.why_not_shared(model)
    language = SimpleNamespace(
        config=model.config.get_text_config(),
        _can_set_attn_implementation=lambda: True,
        _supports_attention_backend=True,
    )
    assert "mrope" in layout_support.why_not_shared(language)
