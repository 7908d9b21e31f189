"""The models and data of TRL's own tests, tiny and local, under their names on the hub.

TRL's test files run here with only their import changed: put them into a folder with a conftest.py
that has `from trl_hub import *`, and run pytest with tests/support in PYTHONPATH. A name such as
trl-internal-testing/zen is then a folder below the current one, so nothing is asked of the hub.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers as T
from family_cases import EXPERTS, GROUPED, HEADS

from rloo_cli.config import synthetic

__all__ = ["hub", "hub_folder"]

ORGANISATION = "trl-internal-testing"
# The beginnings and the ends of the lines that TRL's data set zen is made of.
ZEN = [
    ("Beautiful is better than", " ugly."), ("Explicit is", " better than implicit."),
    ("Simple is better", " than complex."), ("Complex", " is better than complicated."),
    ("Flat is better than", " nested."), ("Sparse is better", " than dense."),
    ("Readability", " counts."), ("Special cases aren't special", " enough."),
    ("Although practicality beats", " purity."), ("Errors should never", " pass silently."),
    ("Unless explicitly", " silenced."), ("In the face of ambiguity, refuse", " to guess."),
    ("There should be one", " way to do it."), ("Although that way may not be", " obvious."),
    ("Now is better", " than never."), ("If the implementation is hard", " it's bad."),
    ("Namespaces are one", " great idea."),
]  # fmt: skip
CAUSAL = {
    "tiny-Qwen2ForCausalLM-2.5": (T.Qwen2Config, GROUPED),
    "tiny-Qwen3ForCausalLM": (T.Qwen3Config, HEADS),
    "tiny-Cohere2ForCausalLM": (T.Cohere2Config, HEADS),
    "tiny-Gemma2ForCausalLM": (T.Gemma2Config, HEADS),
    "tiny-Qwen3MoeForCausalLM": (T.Qwen3MoeConfig, HEADS | EXPERTS),
    "tiny-GptOssForCausalLM": (
        T.GptOssConfig, HEADS | {"num_local_experts": 2, "num_experts_per_tok": 1}
    ),
    "tiny-Glm4MoeForCausalLM": (
        T.Glm4MoeConfig, HEADS | EXPERTS | {"n_routed_experts": 2, "n_group": 1, "topk_group": 1}
    ),
}  # fmt: skip
SCORERS = {
    "tiny-Qwen2ForSequenceClassification-2.5": (T.Qwen2Config, GROUPED),
    "tiny-Qwen3ForSequenceClassification": (T.Qwen3Config, HEADS),
    "tiny-LlamaForSequenceClassification-3.2": (T.LlamaConfig, GROUPED),
}
CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}" \
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"  # fmt: skip


def write_hub(folder: Path) -> None:
    """Write every model and data set of TRL's text tests below a folder."""
    source = synthetic.resolve_model_path("make:tiny")
    tokenizer = T.AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = CHAT
    size = json.loads(Path(source, "config.json").read_text())["vocab_size"]
    shared = {"vocab_size": size, "pad_token_id": tokenizer.pad_token_id or 0}
    shared["max_position_embeddings"] = 2048
    for models, kind in ((CAUSAL, "CausalLM"), (SCORERS, "SequenceClassification")):
        for name, (config, values) in models.items():
            labels = {"num_labels": 1} if models is SCORERS else {}
            torch.manual_seed(0)
            auto = getattr(T, f"AutoModelFor{kind}")
            model = auto.from_config(config(**values | shared | labels))
            model.save_pretrained(folder / ORGANISATION / name)
            tokenizer.save_pretrained(folder / ORGANISATION / name)
    _write_zen(folder / ORGANISATION / "zen")


def _write_zen(folder: Path) -> None:
    rows = {
        "standard_prompt_only": [{"prompt": prompt} for prompt, _ in ZEN],
        "conversational_prompt_only": [
            {"prompt": [{"role": "user", "content": prompt + "?"}]} for prompt, _ in ZEN
        ],
    }
    head = ["---", "configs:"]
    for name, examples in rows.items():
        head += [f"- config_name: {name}", "  data_files:"]
        for split, part in (("train", examples), ("test", examples[:2])):
            path = folder / name / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in part))
            head += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*head, "---", ""]))


@pytest.fixture(scope="session")
def hub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all of them."""
    folder = tmp_path_factory.mktemp("hub")
    write_hub(folder)
    return folder


@pytest.fixture(autouse=True)
def hub(hub_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The names of the hub are folders below the current one."""
    monkeypatch.chdir(hub_folder)
    return hub_folder
