"""Health rules: what goes wrong in RL of language models, seen in a run's own figures.

advisor       what the rules say of a run that goes on: advice, and the errors of guards
evidence      what a rule sees: metrics so far, or a whole run with its samples
metric_rules  rules over KL, entropy, spread, lengths, sampler and updates
reward_rules  rules over the course of the reward and of held-out scores
rules         the table: name, what to change, functions of the three modules
sample_rules  rules over the samples of a whole run
"""
