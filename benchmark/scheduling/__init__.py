"""The real scheduler and the real radix tree, with a model of step time in place of the model.

``python -m benchmark.scheduling`` plays traces of programs on it, for every policy and several cache sizes.
"""
