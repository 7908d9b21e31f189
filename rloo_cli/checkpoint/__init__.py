"""Saving a run, and going on from what was saved.

export      write the model as from_pretrained and vLLM load it
manifest    which files a checkpoint has, with their hashes
restore     take over a run folder and load a checkpoint into a Run
resume      decide where a run resumes
rollback    puts a run folder back to a checkpoint; room on the disk
run_folder  what lies where a run wants its folder
save        save a checkpoint
step_state  the batch of an unfinished step, as tensors and plain values
"""
