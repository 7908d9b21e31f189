"""Data and models that the project makes itself: no download.

addition    Two-digit addition, one token per character
cache       Make a folder once, and keep it in the cache
tiny        A random model, a byte tokenizer and a few prompts
tldr        The TL;DR pipeline in miniature, made here
tldr_posts  the posts, and the hidden rule that says how good a summary is
"""
