"""Trellis beside other engines: the same weights, the same prompts, in alternation. See ``benchmark/peers/__main__.py``."""
