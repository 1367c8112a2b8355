"""Triton kernels: what a decoder layer, its attention and the sampler do on a GPU where flashinfer is not installed."""
