"""Health rules: common failures of RL on language models, detected from a run's metrics.

advisor       applies the rules during a run: advice, and the errors of guards
evidence      the input of a rule: metrics so far, or a whole run with its samples
metric_rules  rules over KL, entropy, spread, lengths, sampler and updates
reward_rules  rules over the course of the reward and of held-out scores
rules         the table: name, what to change, functions of the three modules
sample_rules  rules over the samples of a whole run
"""
