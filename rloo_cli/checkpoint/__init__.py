"""Saving a run, and going on from what was saved.

export      write the model as from_pretrained and vLLM load it
manifest    checkpoint manifest + hashes + discovery
restore     take over a run folder and load a checkpoint into a Run
resume      decide where a run resumes
rollback    roll the run folder back to a checkpoint; disk checks
run_folder  what lies where a run wants its folder
save        save a checkpoint
step_state  the batch of an unfinished step, as tensors and plain values
"""
