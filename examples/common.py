"""The one argument that all examples have: ``--url`` uses a server instead of loading the model in this process."""

from __future__ import annotations

import argparse

from trellis.frontend import Backend, Engine, RuntimeEndpoint


def choose_backend() -> Backend:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", help="a running server, e.g. http://127.0.0.1:30000")
    parser.add_argument("--model", default="smollm2-135m", help="model to load if there is no --url")
    arguments = parser.parse_args()
    return RuntimeEndpoint(arguments.url) if arguments.url else Engine(arguments.model)
