"""The data: rows, prompts and their order, batches, and their layout for a forward pass.

batch         what was sampled, and everything known of it
bin_packing   which completions share a forward pass
dataset       a data set's split: found, opened, its columns checked
filters       which rows are used: data.filter, data.streaming
mapping       data.map: each row through a function of the user's
mixture       several sources as one split: data.mixture
order         which prompt stands at which place
packing       groups laid out for a forward pass, and what comes back
prompts       rows to tokenised prompts, and the order they are drawn in
segments      sums over ragged rows, log-probabilities of targets
splits        the split a run trains on and the sets held out
synthetic/    data and models that are made here: make:NAME
vocabulary    whether tokenizer, data and models speak of the same tokens
"""
