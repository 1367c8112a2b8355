"""Small arrays of the host on their way to the device of a tensor."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device, that nothing waits for; on a CPU the array itself, seen as a tensor.

    The pinned memory in between comes from torch's caching host allocator, which gives it to nobody else before the copy is
    done.
    """
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
