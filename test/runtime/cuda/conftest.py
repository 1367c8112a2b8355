"""Lets the fakes of this folder, those of the scheduler, and random decoders be imported by name."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "scheduler", HERE.parent / "native"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
