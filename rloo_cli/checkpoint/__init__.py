"""Saving a run, and resuming from a checkpoint.

export       write the model as from_pretrained and vLLM load it
manifest     list and hash the files of a checkpoint
restore      take over a run folder and load a checkpoint into a Run
resume       decide where a run resumes
rollback     roll a run folder back to a checkpoint; check disk space
run_folder   check whether a run may use its folder
save         save a checkpoint
step_record  record the rollouts of a finished step
step_state   turn the batch of an unfinished step into tensors and plain values, and back
"""
