"""The trainer: a config, a corpus, a model, a loop, checkpoints and records of what was sent.

Importing this package imports nothing heavy; transformers, tokenizers and matplotlib are loaded where they are used.
"""
