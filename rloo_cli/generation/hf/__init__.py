"""Sampling with the trained transformers model itself.

decode_batch     the sequences of one decoding batch
generator        the generator of generation=transformers, and a whole copy of sharded weights
grammar          completions that follow a regular expression, a JSON schema, a choice
kv_cache         keys and values kept while decoding
repeated_prefix  a prompt's keys and values are repeated for each completion
sampling         temperature, top-p, top-k, min-p; seeded samples
shared_prefix    a prompt's keys and values are shared by its group
"""
