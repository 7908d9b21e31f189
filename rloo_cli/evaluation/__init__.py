"""Held-out scores and judges.

evaluate  answers, scores and judges held-out prompts
judges/   pairs judged by a model or a reward
metrics   the metrics of an evaluation, unbiased pass@k
worker    the process of `rloo eval`
"""
