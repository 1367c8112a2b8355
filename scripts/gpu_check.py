#!/usr/bin/env python3
"""Proves the GPU executor on this machine's GPU: ``python scripts/gpu_check.py``.

From a plain checkout, without a network, made for under 8 minutes on one GPU: every backend against the reference, the same
greedy text with graphs, overlap, radix cache and jump-forward each on and off, what each is worth, decode and prefill as
shares of what the device can do, gaps between steps, and memory against the plan. It takes what the machine has and says what
it skipped. See docs/gpu.md for how to read the report.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmark.gpu.checkout import make_importable  # noqa: E402

NOTES = make_importable(ROOT)

from benchmark.gpu.check import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(NOTES))
