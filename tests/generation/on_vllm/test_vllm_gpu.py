"""What only a GPU can show of the engines: CUDA IPC, sleep, bfloat16, NCCL between two GPUs."""

from pathlib import Path

import pytest
import torch
from test_vllm_weights import Pair

pytestmark = [pytest.mark.vllm, pytest.mark.gpu]
needs = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@needs
@pytest.mark.parametrize("sleep", ["none", "kv", "weights"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_by_cuda_ipc_answer_also_after_sleep(
    tmp_path: Path, sleep: str, dtype: str
) -> None:
    words = (f"generation.colocate.sleep={sleep}", f"model.dtype={dtype}")
    pair = Pair("qwen3-tied", tmp_path, *words, device="cuda")
    limit = 1e-3 if dtype == "float32" else 0.5
    try:
        for change in range(3):
            with torch.no_grad():
                for parameter in pair.model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
            pair.load()
            assert pair.gap(pair.sample([change, 7])) < limit
            assert pair.gap(pair.sample([change, 8])) < limit  # asleep in between, nothing loaded
    finally:
        pair.generator.close()
