"""What trainer and server must agree on: the server tells it at GET /rloo, the trainer compares.

Imports neither torch nor vLLM; both sides compute the fingerprint from transformers' tokenizer.
"""

import hashlib
import json
from typing import Any

PROTOCOL = 1  # of rloo's own routes and facts
GROUP = "/rloo/generate"  # the route of `group_route`, where a server says that it has it
VARIABLE = "RLOO_SERVER_FACTS"  # the environment variable by which the guard gets them
TEXTS = (
    "What is 17 + 25?", " leading and  double  spaces\n\nnew lines\t", "naïve café 東京 🙂",
    "def f(x):\n    return x ** 2", "0123456789 0.5e-3", "<|im_start|>user",
)  # fmt: skip


def tokenizer(tok: Any) -> str:
    """A fingerprint of a tokenizer: its vocabulary, its special ids, and how it cuts some texts.

    Neither the pad token (a trainer picks one where there is none) nor the chat template counts.
    """
    special = {name: getattr(tok, f"{name}_token_id", None) for name in ("bos", "eos", "unk")}
    encoded = [list(tok.encode(text, add_special_tokens=False)) for text in TEXTS]
    whole = [sorted(tok.get_vocab().items()), special, encoded]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]
