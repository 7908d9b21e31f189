"""The config: schema, composition, checks, messages. No torch.

accelerate_file  what a file of `accelerate config` comes to
adapters      keys of LoRA, peft's other kinds and quantised weights
agent         keys and checks of every kind of agent
check         validate, freeze, write and hash a config
column_names  the column or nested field that a key names
compose       Hydra: overrides and groups to one plain dictionary
debug         what +debug replaces
escapes       escapes in values of the command line
hf_cache      the content of the Hugging Face cache, found without network
hooks         guards for the methods of a user's own algorithm
idle_keys     which keys have no effect at other keys' values
judge         keys and checks of eval.judge
key_types     how a key is declared, and types that several share
messages      what is wrong with a config, key by key
mistakes      answers to typical first mistakes on the command line
old_names     names of TRL's and ms-swift's settings, and the nearest key
prompt_limit  how long a prompt may be
pasted        settings that can be pasted, and good guesses, for the fix of an error
provenance    the file and line that each value comes from
registry      names to modules, and a user's own code
rules         what one key forbids another
rules_code    code of the user's own, looked at without running it
rules_lora    rules for adapters, quantization and moving references
rules_model   checks of the files in a model's folder, without torch
rules_overlap  what sampling beside the training does not go with
rules_paths   checks that configured paths exist
rules_sampling  settings that make the sampler another distribution, and its masks
schema        every fixed key: name, type, limits, meaning
slurm_keys    what a batch script asks the cluster for
supervised    settings of sft and reward-model, from a run's config
synthetic     the names behind make:NAME
teacher       keys of a teacher that is asked over HTTP
template      {name} in the templates of judges
user_code     load a user's code, and its part of a traceback
user_files    a user's own YAML files, made known to Hydra
value_model   where a value model is initialised from
vision_models  the families of vision-language models, and how each is computed
"""
