"""Algorithms: one file each. `rloo.py` is the formula; the files in PARTS are shared switches.

An algorithm's file begins with its pydantic `Config` and goes on with functions of tensors. It
uses tensor methods and imports torch for types only, so that the registry reads every schema
without torch. Scores and advantages are (P, K) float64; everything per token is a flat column
(N,) of a `packing.Micro`.
"""

PARTS = (
    "shaping", "kl", "advantage", "ratio", "aggregate", "correction", "passes", "rules", "dialect",
    "losses", "choices", "objective", "siblings", "switches", "tokens",
)  # fmt: skip
