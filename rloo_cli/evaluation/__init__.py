"""Held-out scores and judges.

evaluate  held-out prompts answered, scored and judged
judges/   who wins: pairs judged by a model or a reward
metrics   the metrics of an evaluation, unbiased pass@k
worker    the process of `rloo eval`
"""
