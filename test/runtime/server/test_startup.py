"""What each process of a server does before it is ready, and what it leaves alone: counted, in fresh interpreters."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from trellis.errors import ModelLoadError
from trellis.runtime.config import ServerConfig
from trellis.runtime.models import Tokenizer
from trellis.runtime.server import supervisor as supervisor_module
from trellis.runtime.server.supervisor import Supervisor

pytestmark = pytest.mark.model

COUNTED = """
import json, sys
from trellis.runtime.models import gguf_file
read, reads = gguf_file.read_gguf, []
def counting(path):
    reads.append(str(path))
    return read(path)
gguf_file.read_gguf = counting
"""

SETTINGS = """
from trellis.runtime.server.child import Settings
config = dict(model_path="smollm2-135m", dtype="bfloat16", num_threads=1, max_total_tokens=256, context_length=256)
settings = Settings(config, "", "")
"""

ROLES = {
    "scheduler": SETTINGS
    + "from trellis.runtime.server.scheduler_process import _assemble; _assemble(settings, lambda: None).close()",
    "detokenizer": SETTINGS
    + "from trellis.runtime.server.detokenizer_process import _load; assert _load(settings).process([]) == []",
    # Up to where the children run: a stand-in takes the place of those.
    "http": """
from trellis.errors import ModelLoadError
from trellis.runtime.server import supervisor
class StandIn:
    def __init__(self, config, load, on_ready, on_fatal):
        load()
        raise ModelLoadError("no children here")
supervisor.Supervisor = StandIn
from trellis.launch_server import launch_server
sys.stdout, out = sys.stderr, sys.stdout
assert launch_server(["--model-path", "smollm2-135m", "--port", "0"]) == 2
sys.stdout = out
""",
}

# Beside those that no process of a server needs.
LEFT_ALONE = {
    "scheduler": {"fastapi", "uvicorn"},
    "detokenizer": {"fastapi", "uvicorn", "torch", "gguf"},
    "http": {"torch", "gguf"},
}


@pytest.mark.parametrize("role", ROLES)
def test_each_process_reads_the_file_once_and_loads_only_what_it_needs(role):
    code = COUNTED + ROLES[role] + "\nprint(json.dumps([len(reads), sorted(sys.modules)]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reads, modules = json.loads(done.stdout.splitlines()[-1])
    assert reads == 1
    assert not (LEFT_ALONE[role] | {"transformers", "trellis.frontend"}) & set(modules)


class Recorded:
    """Stands in for a child process."""

    made: list[Recorded]

    def __init__(self, name: str, _settings: object) -> None:
        self.name, self.ended = name, False
        self.made.append(self)

    def end(self, _force: bool = False) -> None:
        self.ended = True

    def reap(self, _grace: float) -> str:
        return "exit code 0"


def test_the_children_are_started_before_the_tokenizer_is_made_and_ended_if_it_cannot_be(monkeypatch):
    monkeypatch.setattr(Recorded, "made", [], raising=False)
    monkeypatch.setattr(supervisor_module, "Child", Recorded)
    seen = []

    def load() -> Tokenizer:
        seen.extend(child.name for child in Recorded.made if not child.ended)
        raise ModelLoadError("it has no tokenizer")

    config = ServerConfig("somewhere", context_length=16, max_total_tokens=16)
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        Supervisor(config, load, lambda: None, lambda *_: None)
    assert seen == ["scheduler", "detokenizer"]
    assert all(child.ended for child in Recorded.made)
