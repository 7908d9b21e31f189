"""The config: schema, composition, checks, messages. No torch.

accelerate_file  keys from a file of `accelerate config`
adapters      keys of LoRA, peft's other kinds and quantized weights
agent         keys and checks of every kind of agent
check         validates, freezes, writes and hashes a config
column_names  the column or nested field that a key names
compose       Hydra: overrides and groups to one plain dictionary
debug         the replacements of +debug
escapes       escapes in values of the command line
hf_cache      the content of the Hugging Face cache, found without network
hooks         guards for the methods of a user's own algorithm
idle_keys     keys without an effect at the values of other keys
judge         keys and checks of eval.judge
key_types     how a key is declared, and types that several share
messages      errors of a config, key by key
mistakes      answers to typical first mistakes on the command line
old_names     names of TRL's and ms-swift's settings, and the nearest key
prompt_limit  how long a prompt may be
pasted        settings to paste and likely guesses, for the fix of an error
provenance    the file and line that each value comes from
registry      names to modules, and a user's own code
rules         rules between keys
rules_code    checks of the user's code without running it
rules_lora    rules for adapters, quantization and moving references
rules_model   checks of the files in a model's folder, without torch
rules_overlap  settings that do not go with overlapped sampling
rules_paths   checks that configured paths exist
rules_sampling  settings that change the sampler's distribution, and its masks
rules_target  the rules of target
schema        every fixed key: name, type, limits, meaning
slurm_keys    resources of a batch script
supervised    settings of sft and reward-model, from a run's config
synthetic     the names behind make:NAME
teacher       keys of a teacher behind HTTP
template      {name} in the templates of judges
user_code     load a user's code, and its part of a traceback
user_files    a user's own YAML files, made known to Hydra
value_model   initial weights of a value model
vision_models  supported families of vision-language models
"""
