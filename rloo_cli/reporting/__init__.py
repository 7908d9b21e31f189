"""What a run writes and shows: metrics, log lines, the panel, curves, advice.

advice          what a run is told about its health
curves          matplotlib curves of one run
display         a live panel, or plain lines
eval_lines      which lines of metrics.jsonl are evaluations, and what is shown of them
log             metrics.jsonl, samples, terminal
metric_names    every metric with its unit and meaning
panel           the panel, for a terminal or as SVG
prompt_ledger   what became of every prompt, line by line
step_metrics    a step's metrics: rewards, advantages, speed, memory
update_metrics  metrics of an update, summed over its micro-batches
"""
