"""Inspects runs through their files.

No module here changes a run or imports torch, unless noted.

diagnosis/        problems of a run, from its files
environment/      the machine and an experiment before a run (torch with --deep)
first_difference  the first difference of two runs
ledger_sums       adds up the prompt ledger
model_card        the card of a run's model, for a hub
record_score     scores the completions of a record again (imports torch)
replay_builder    builds a run with recorded completions (imports torch)
report/           one HTML page about a run
reward_what_if    what another reward would have taught (imports torch)
resume_proof      trains twice, once with a kill, and compares (starts processes)
run_folders       finds the folder of a run by path or name
run_list          a line for each run in a folder
run_seal         seals a finished run into the folder of a record
run_record        the config, state, metrics and evaluations of a run
run_screen        the values and one frame of `rloo top`
sample_files      finds and reads the samples of a step or an evaluation
step_differences  compares a recomputed step with its record (imports torch)
step_replay       recomputes a recorded step (imports torch)
"""
