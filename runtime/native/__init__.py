"""The CPU step in C++: kernels that are compiled at first use, and the decoder that runs on them.

Names are loaded when first used, so that asking whether the kernels can run here does not import torch.
"""

from __future__ import annotations
