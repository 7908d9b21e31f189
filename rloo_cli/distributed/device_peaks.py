"""The peak performance of GPUs by their makers' data sheets, in one table.

`perf/mfu` divides by a peak; `rloo plan` uses the share of it that programs reach. The speed of a
matrix product on one machine is another, lower number (bench/gpu.py measures it). Without
torch.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class DevicePeaks:
    """A GPU's peak."""

    flops_per_s: float  # bfloat16 products of dense matrices, summed in float32
    bytes_per_s: float  # of its memory


_H100, _A100 = DevicePeaks(989e12, 3.35e12), DevicePeaks(312e12, 2.0e12)
DEVICE_PEAKS = {
    "B200": DevicePeaks(2250e12, 8.0e12), "H200": DevicePeaks(989e12, 4.8e12), "H100": _H100,
    "H100 NVL": DevicePeaks(835e12, 3.9e12), "H100 PCIe": DevicePeaks(756e12, 2.0e12),
    "H800": _H100, "GH200": DevicePeaks(989e12, 4.0e12), "A100": _A100, "A800": _A100,
    "L40S": DevicePeaks(362e12, 0.864e12), "L40": DevicePeaks(181e12, 0.864e12),
    "RTX 4090": DevicePeaks(165e12, 1.008e12), "L4": DevicePeaks(121e12, 0.3e12),
    "A10": DevicePeaks(125e12, 0.6e12), "A10G": DevicePeaks(70e12, 0.6e12),
}  # fmt: skip


def find_device_kind(device_name: str) -> str | None:
    """The name in `DEVICE_PEAKS` of a GPU by the driver's name, such as NVIDIA A100-SXM4-80GB.

    None for a GPU that is not in the table, and for a part of one (MIG). Whole words count: an
    A10G is not an A10, nor an L40S an L4.
    """
    words = re.split(r"[\s-]+", device_name)
    kinds = [kind for kind in DEVICE_PEAKS if {*kind.split()} <= {*words}]
    return None if "MIG" in words else max(kinds, key=len, default=None)


def find_peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU by its data sheet; None if it is not in the table."""
    kind = find_device_kind(device_name)
    return None if kind is None else DEVICE_PEAKS[kind].flops_per_s
