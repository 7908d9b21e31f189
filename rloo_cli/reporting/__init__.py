"""What a run writes and shows: metrics, log lines, the panel, curves, advice.

advice          training-health heuristics that print hints
curves          matplotlib curves of one run
display         live panel / plain log lines
eval_rows       which lines of metrics.jsonl are evaluations, and what is shown of them
log             metrics.jsonl, samples, terminal
metric_names    every metric with its unit and meaning
panel           rendering of the terminal panel / SVG
prompt_ledger   append-only log of what became of every prompt
step_metrics    a step's metrics: rewards, advantages, speed, memory
update_metrics  metric accumulators over micro-batches
"""
