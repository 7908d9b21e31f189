"""The data: examples, prompts and their order, batches, and their layout for a forward pass.

batch           rollouts, groups and the batch of a step
bin_packing     which completions share a forward pass
cache           makes a folder once, and keeps it in the cache
chat_templates  renders conversations, with the clock fixed at the run's start
csv_files       rows of CSV files, every cell as text
dataset         find and open a data set's split, check its columns
episode_media   the images of an episode's row
exact_values    tables that keep the values of rows as written
filters         which examples are used: data.filter, data.streaming
fingerprint     a hash of a data set's content
image_prompts   which images belong to which prompt
image_rules     what a run with images cannot do
images          opens images, and finds bad ones
json_files      rows of JSON files, with values as written
lazy            sequences whose values are read on access
mapping         data.map: a user's function that changes each example
media           the images of a prompt, as a forward pass needs them
mixture         several sources as one split: data.mixture
order           the order in which prompts are sampled
pass_results    what forward passes computed, for every rank's groups
packing         lay groups out for a forward pass, and store what comes back
prompt_ends     warns of prompts that end with an end-of-text token, or with the answer
prompts         the prompts of a split, read when they are drawn
render          the rows of a split as prompts
rollout_files   the files of recorded rollouts: their paths and headers
rollout_record  writes and reads the whole batch of a step
rollout_values  a rollout, or an episode with its turns, as plain values without its tokens
sampling_mask   the ids that a sampler chose each token from
segments        sums over segments, log-probabilities of targets
splits          the split that a run trains on, and its held-out sets
survey          checks all prompts of a split once
synthetic/      data and models that the project makes itself: make:NAME
tasks           procedural tasks of reasoning-gym: reasoning_gym:NAME
value_types     converts columns: data.types, NaN, an index of pandas
vision_processor  images and text to token ids and tensors
web_files       reads a URL that a data set names, from public addresses only
vocabulary      checks that tokenizer, data and models have the same tokens
"""
