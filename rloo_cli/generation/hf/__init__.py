"""Sampling with the trained transformers model itself.

decode_batch   the rows of one decoding batch
generator      the generator of generation=transformers
kv_cache       keys and values kept while decoding
repeated_prefix  prompts computed once per completion
replica        a whole copy of sharded weights, for sampling
sampling       temperature, top-p, top-k, min-p; seeded draws
shared_prefix  prompts computed once per group
"""
