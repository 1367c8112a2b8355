from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# The tests have no packages, so that their files need no unique names; what they share is loaded by its path.
if "runtime_fakes" not in sys.modules:
    spec = importlib.util.spec_from_file_location("runtime_fakes", Path(__file__).with_name("fakes.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["runtime_fakes"] = module
    spec.loader.exec_module(module)
