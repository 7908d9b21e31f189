"""Random reward models of several families, what a run tells them, and the class's own scores."""

import functools
import tempfile
from pathlib import Path

import tokenizers
import torch
import transformers
import yaml
from policy_cases import SIZE
from tokenizers import processors

from rloo_cli.config.registry import config_class
from rloo_cli.data.prompts import Prompts
from rloo_cli.data.synthetic import tiny
from rloo_cli.policy import reward_load, shared_attention
from rloo_cli.rewards.engine.build import build_reward
from rloo_cli.rewards.engine.ready import RewardSetup

CONF = Path(__file__).parents[2] / "conf"
WIDE = SIZE | {"vocab_size": 258, "num_labels": 1, "max_position_embeddings": 128}
SMALL = {k: v for k, v in WIDE.items() if k not in ("intermediate_size", "initializer_range")}
T = transformers
FAMILIES = {
    "qwen3": lambda: T.Qwen3Config(**WIDE, num_key_value_heads=2, head_dim=8),
    "llama": lambda: T.LlamaConfig(**WIDE, num_key_value_heads=2),
    "gpt_neox": lambda: T.GPTNeoXConfig(**WIDE),
    "window": lambda: T.MistralConfig(**WIDE, num_key_value_heads=2, sliding_window=6),
    "bloom": lambda: T.BloomConfig(**SMALL, initializer_range=0.3),
    "falcon": lambda: T.FalconConfig(**SMALL, initializer_range=0.3, alibi=True),
    "bert": lambda: T.BertConfig(**WIDE),
    "decoder": lambda: T.ModernBertDecoderConfig(  # a layer of its own before the head
        **{k: v for k, v in WIDE.items() if not k.endswith("token_id")}, local_attention=64,
        pad_token_id=0, eos_token_id=1, bos_token_id=2, cls_token_id=2, sep_token_id=1,
    ),
    "t5": lambda: T.T5Config(
        vocab_size=258, d_model=32, d_kv=8, num_heads=4, d_ff=64, num_layers=2, num_labels=1,
        eos_token_id=1, pad_token_id=0, decoder_start_token_id=0, initializer_factor=1.0,
    ),
    "xlnet": lambda: T.XLNetConfig(  # its head reads the last place, padding or not
        vocab_size=258, d_model=32, n_layer=2, n_head=4, d_inner=64, num_labels=1, pad_token_id=0,
        initializer_range=0.3,
    ),
}  # fmt: skip
BY_CLASS = "padded, by its own class"
FOUND = {"qwen3": "shared", "llama": "shared", "gpt_neox": "shared", "window": "packed",
         "bloom": "padded", "falcon": "padded", "bert": BY_CLASS, "decoder": BY_CLASS,
         "t5": BY_CLASS, "xlnet": "one by one, by its own class"}  # fmt: skip
PROMPTS = ["Sum up: a cat sat.", "Name two.", "Q"]
ANSWERS = [
    ["A cat.", "Cats sit down", "A c"],
    ["one, two", "three", ""],
    ["R", "R", "a longer one"],
]
ENDED = [[True, False, True], [False, True, True], [True, True, False]]


def tokenizer(side="right", pad="<pad>", order=("<pad>", "<eos>"), ends=False, bos=None):
    """A token per byte. `order`: of the first two ids; `ends`: it puts EOS behind every text."""
    made = tiny.tiny_tokenizer()
    if order != ("<pad>", "<eos>"):
        vocabulary = made.get_vocab() | {token: i for i, token in enumerate(order)}
        made = T.PreTrainedTokenizerFast(
            tokenizer_object=_plain(vocabulary, made), pad_token="<pad>", eos_token="<eos>"
        )
        made.chat_template = tiny.TEMPLATE
    made.padding_side = side
    made.pad_token = pad
    if bos:
        made.bos_token = bos
    if ends or bos:
        single = ([f"{bos}:0"] if bos else []) + ["$A:0"] + (["<eos>:0"] if ends else [])
        special = [(t, made.convert_tokens_to_ids(t)) for t in filter(None, (bos, "<eos>"))]
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(single), special_tokens=special
        )
    return made


def _plain(vocabulary, like):
    plain = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    plain.pre_tokenizer = like.backend_tokenizer.pre_tokenizer
    plain.decoder = like.backend_tokenizer.decoder
    return plain


@functools.cache
def weights(family="qwen3", labels=1, dtype=torch.float32):
    """The folder of a random model of this family, without a tokenizer."""
    folder = Path(_place().name) / f"{family}-{labels}"
    config = FAMILIES[family]()
    config.num_labels = labels
    torch.manual_seed(3)
    model = T.AutoModelForSequenceClassification.from_config(config)
    model.to(dtype).save_pretrained(folder)
    return folder


@functools.cache
def _place():
    return tempfile.TemporaryDirectory(prefix="rloo-tests-")


def settings(path, **changes):
    """The entry of conf/reward/model.yaml for a folder, with changes."""
    common = yaml.safe_load((CONF / "config.yaml").read_text())["reward_defaults"]
    own = yaml.safe_load((CONF / "reward/model.yaml").read_text())["model"]
    return config_class("rewards", "model")(**common | own | {"path": str(path)} | changes)


def prompts(policy, conversational=False, texts=PROMPTS):
    """The prompts of a split, as the policy's tokenizer encodes them."""
    got = [[{"role": "user", "content": p}] for p in texts] if conversational else list(texts)
    if conversational:
        rendered = [
            policy.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in got
        ]
        ids = [policy(text, add_special_tokens=False)["input_ids"] for text in rendered]
    else:
        ids = [policy(p)["input_ids"] for p in got]
    rows = [{"answer": "It is so."} for _ in texts]
    lengths = [len(i) for i in ids]
    return Prompts(
        got, [list(i) for i in ids], rows, conversational, "x", unfiltered_lengths=lengths,
        example_numbers=range(len(ids)),
    )  # fmt: skip


def made_ready(family, own, policy=None, conversational=False, folder=None, splits=None, **changes):
    """A reward model of this family with this tokenizer, made ready; and what it noted."""
    policy = policy or tiny.tiny_tokenizer()
    root = folder or Path(tempfile.mkdtemp(dir=_place().name))
    own.save_pretrained(root)
    given = {"tokenizer": str(root), **changes}
    reward = build_reward("rm", settings(weights(family), **given))
    noted = []
    splits = splits or [prompts(policy, conversational)]
    around = RewardSetup(policy, splits, 60, torch.device("cpu"), noted.append, reward_load)
    reward.code.prepare_model(around)
    return reward.code, noted


def rows(policy=None, conversational=False, ended=ENDED):
    """Arguments of a call: PROMPTS with ANSWERS, ended by the policy's EOS or not at all."""
    policy = policy or tiny.tiny_tokenizer()
    made = prompts(policy, conversational)
    given = {"prompts": [], "completions": [], "prompt_ids": [], "completion_ids": []}
    given |= {"finish_reasons": [], "group_index": []}
    for p, answers in enumerate(ANSWERS):
        for text, end in zip(answers, ended[p], strict=True):
            ids = list(policy(text, add_special_tokens=False)["input_ids"])
            given["prompts"].append(made.prompts[p])
            said = [{"role": "assistant", "content": text}] if conversational else text
            given["completions"].append(said)
            given["prompt_ids"].append(made.prompt_ids[p])
            given["completion_ids"].append(ids + [policy.eos_token_id] * end)
            given["finish_reasons"].append("stop" if end else "length")
            given["group_index"].append(p)
    return given


@torch.no_grad()
def by_class(family, ids):
    """The class's own score of each row, alone, unpadded and with no pad id to look for."""
    model = T.AutoModelForSequenceClassification.from_pretrained(
        weights(family), dtype=torch.float32
    ).eval()
    model.config.pad_token_id = -1  # no token's id: some classes refuse None
    return [float(model(torch.tensor([row])).logits) for row in ids]


def force(code, layout):
    """Let a reward model that can have any layout compute in this one."""
    (
        shared_attention.install_shared_attention
        if layout == "shared"
        else shared_attention.uninstall_shared_attention
    )(code.model.model)
    code.model.layout = layout
