"""vLLM's own LLM, without anything of `rloo`'s: seconds of a batch, a line of JSON at the end.

python bench/vllm_alone.py FILE     arguments of LLM, prompts, k, length and rounds, as JSON
"""

import json
import sys
import time
from pathlib import Path


def main() -> None:
    """Sample the batch so many times; a first one does not count."""
    from vllm import LLM, SamplingParams, TokensPrompt

    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    llm = LLM(**asked["arguments"])
    params = SamplingParams(n=asked["k"], max_tokens=asked["length"], min_tokens=asked["length"],
                            ignore_eos=True, temperature=1.0)  # fmt: skip
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in asked["prompts"]]
    seconds = []
    for number in range(asked["rounds"] + 1):
        began = time.perf_counter()
        told = llm.generate(prompts, params, use_tqdm=False)
        seconds += [time.perf_counter() - began] if number else []
        assert all(len(c.token_ids) == asked["length"] for each in told for c in each.outputs)
    print("\n" + json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
