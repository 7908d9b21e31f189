"""What calls rewards: their code, their arguments, threads and processes, results and failures.

arguments       what a reward is called with
build           one reward: code, config, signature
cache           scores kept for equal calls
columns         whether the data has the columns
failures        what a failed call does to the step
process_pool    rewards in processes of their own
process_worker  such a process
ready           all rewards of a config, made ready
results         what a call gave, validated
reward_calls    calls with deadlines, on threads and loops
scoring         a step's scores
"""
