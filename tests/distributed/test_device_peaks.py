"""The one table of GPUs' peaks: whom `perf/mfu` and a plan's seconds are computed for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rloo_cli.distributed.device_peaks import DEVICE_PEAKS, find_device_kind, find_peak_flops
from rloo_cli.planning import device
from rloo_cli.reporting.step_metrics import speed_metrics
from rloo_cli.reporting.update_metrics import UpdateMetrics


@pytest.mark.parametrize(("name", "kind"), [
    ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", "H100 PCIe"),
    ("NVIDIA H100 NVL", "H100 NVL"), ("NVIDIA H200", "H200"), ("NVIDIA GH200 480GB", "GH200"),
    ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA A10", "A10"), ("NVIDIA A10G", "A10G"),
    ("NVIDIA L4", "L4"), ("NVIDIA L40S", "L40S"), ("NVIDIA L40", "L40"),
    ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("NVIDIA RTX A1000", None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
])  # fmt: skip
def test_a_gpu_is_known_by_whole_words_of_its_name(name: str, kind: str | None) -> None:
    assert find_device_kind(name) == kind
    assert find_peak_flops(name) == (None if kind is None else DEVICE_PEAKS[kind].flops_per_s)


@pytest.mark.parametrize("gpu", device.GPUS.values(), ids=str)
def test_a_plan_takes_no_gpu_for_faster_than_its_data_sheet(gpu: device.Device) -> None:
    plain = {kind.replace(" ", ""): peaks for kind, peaks in DEVICE_PEAKS.items()}
    sheet = plain[gpu.name.partition("-")[0]]
    assert 0.75 < gpu.flops_per_s / sheet.flops_per_s < 0.85
    assert 0.65 < gpu.bytes_per_s / sheet.bytes_per_s < 0.95


def test_mfu_is_the_share_of_the_data_sheets_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = {"get_device_name": "NVIDIA H100 80GB HBM3", "max_memory_allocated": 0,
            "memory_reserved": 0}  # fmt: skip
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    batch: Any = SimpleNamespace(groups=[SimpleNamespace(prompt_ids=[1], rollouts=[])])
    batch.groups[0].rollouts = [SimpleNamespace(length=3)]
    batch.score, batch.num_tokens = torch.zeros(1, 1), 4
    updates, world = UpdateMetrics(), SimpleNamespace(device=torch.device("cuda"), size=2)
    updates.work["flop"] = 2 * 3 * 0.4 * 989e12
    seconds = {"step_time": 9.0, "time/update": 2.0, "time/reference": 1.0, "time/generation": 5.0}
    found = speed_metrics(batch, updates, seconds, "shared", 1, world)  # type: ignore[arg-type]
    assert found["perf/mfu"] == pytest.approx(0.4)
