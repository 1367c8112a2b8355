"""Lets the fakes of this folder, those of the scheduler and of flashinfer, and random decoders be imported by name."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, *(HERE.parent / name for name in ("scheduler", "native", "attention"))):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
