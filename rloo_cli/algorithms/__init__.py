"""Algorithms: one file each. `rloo.py` is the formula; `common/` has the switches they share.

An algorithm's file begins with its pydantic `Config` and goes on with functions of tensors. It
uses tensor methods and imports torch for types only, so that the registry reads every schema
without torch. Scores and advantages are (P, K) float64; everything per token is a flat column
(N,) of a `packing.Micro`.
"""
