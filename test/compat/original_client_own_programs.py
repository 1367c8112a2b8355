"""Runs programs that the original system's package brings along, ``sglang.test.test_programs``, as they are.

    python original_client_own_programs.py URL OUTPUT NAME...

The named functions run at the same time, a thread each. OUTPUT is a JSON object of function name to what became of it:
the name and the text of its exception, or null, and the text, the variables and the error of every state that its programs
ended with.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sglang as sgl
from sglang.test import test_programs

WITHOUT_CHECK = {"check_answer": False}  # whether the answer is true, which is not up to the server
ARGUMENTS = {
    "test_select": WITHOUT_CHECK,
    "test_expert_answer": WITHOUT_CHECK,
    "test_parallel_encoding": WITHOUT_CHECK,
}

mine = threading.local()


def watched(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which also notes the states that it returns."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        mine.states += result if isinstance(result, list) else [result]
        return result

    return call


def run(name: str, found: dict[str, Any]) -> None:
    mine.states = []
    error = None
    try:
        getattr(test_programs, name)(**ARGUMENTS.get(name, {}))
    except Exception as caught:
        error = [type(caught).__name__, str(caught)]
    states = [
        {"text": each.text(), "values": each.stream_executor.variables, "failure": each.error()}
        for each in mine.states
    ]
    found[name] = {"error": error, "states": states}


if __name__ == "__main__":
    url, output, *names = sys.argv[1:]
    sgl.set_default_backend(sgl.RuntimeEndpoint(url))
    for method in ("run", "run_batch"):
        setattr(sgl.lang.ir.SglFunction, method, watched(getattr(sgl.lang.ir.SglFunction, method)))
    found: dict[str, Any] = {}
    threads = [threading.Thread(target=run, args=(name, found)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    Path(output).write_text(json.dumps(found, default=str), "utf-8")
