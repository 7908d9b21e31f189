"""Calls rewards: their code, their arguments, threads and processes, results and failures.

arguments       the arguments of a reward's call
build           one reward: code, config, signature
cache           scores kept for equal completions
columns         checks that the data has the required columns
failures        decides whether failed calls stop the run
ready           builds all rewards and lets them load
results         the validated result of a call
reward_calls    calls with deadlines, on threads and loops
scoring         the scores of a step
step_calls      all rewards' calls of a step, without torch
worker          the worker process of a reward
worker_calls    calls in worker processes
"""
