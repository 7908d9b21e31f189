"""Algorithms: one file each. `rloo.py` is the whole formula; `common/` has the shared switches.

An algorithm's file has its pydantic `Config` and its class. It uses tensor methods and imports
torch for types only, so that the registry reads every schema without torch. Scores and advantages
are (P, K) float64; everything per token is a flat column (N,) of a `packing.MicroBatch`.
"""
