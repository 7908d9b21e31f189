"""The config: schema, composition, checks, messages. No torch.

check         validate, freeze, write and hash a config
compose       Hydra: overrides and groups to one plain dictionary
debug         what +debug replaces
hf_cache      HF cache lookups without network
hooks         functions of a user's own algorithm file, guarded
idle_keys     which keys are idle at other keys' values
judge         schema + checks of eval.judge
messages      pydantic/Hydra errors -> Problems in words
mistakes      answers to typical first mistakes on the command line
old_names     old-name table (TRL/ms-swift) + did-you-mean
prompt_limit  how long a prompt may be
provenance    provenance: file:line of each config value
registry      names -> modules, load user code
rules         what one key forbids another
rules_lora    cross-key checks for LoRA / quantization / moving reference
rules_model   what a model's folder rules out, read without torch
rules_paths   checks that configured paths exist
schema        every fixed key: name, type, limits, meaning
supervised    SFT/RM settings derived from the run config
synthetic     the names behind make:NAME
template      {name} template filling for judge prompts
user_code     load a user's code, and its part of a traceback
user_files    user's own YAML files registered with Hydra
value_model   where a value model is initialised from
"""
