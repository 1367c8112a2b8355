"""What a step on a CUDA device needs beyond the decoder: sizes of pools, graphs, and tokens that stay on the device."""
