"""The config: schema, composition, checks, messages. No torch."""
