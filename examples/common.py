"""What all examples share: ``--url`` uses a server instead of loading the model in this process."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator

from trellis.errors import TrellisError
from trellis.frontend import Backend, Engine, RuntimeEndpoint


@contextlib.contextmanager
def choose_backend() -> Iterator[Backend]:
    """The backend that the command line asks for. An error of Trellis ends the example with one line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", help="a running server, e.g. http://127.0.0.1:30000")
    parser.add_argument("--model", default="smollm2-135m", help="model to load if there is no --url")
    arguments = parser.parse_args()
    try:
        with _backend(arguments) as backend:
            yield backend
            sys.stdout.flush()
    except TrellisError as error:
        raise SystemExit(f"error: {error}") from None
    except BrokenPipeError:  # the reader has seen enough (... | head); the interpreter would flush once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _backend(arguments: argparse.Namespace) -> Backend:
    if arguments.url:
        return RuntimeEndpoint(arguments.url)
    print("Loading the model ...", file=sys.stderr, flush=True)
    return Engine(arguments.model)
