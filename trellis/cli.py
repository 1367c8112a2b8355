"""The ``trellis`` command: ``serve`` starts a server; the others talk to one that runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import trellis
from trellis.errors import BackendError, TrellisError

DEFAULT_URL = "http://127.0.0.1:30000"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (2: a mistake in the arguments)."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["serve"]:  # the server owns its flags
        from trellis.launch_server import main as serve

        return serve(args[1:])
    options = _parser().parse_args(args)
    try:
        return int(options.run(options))
    except TrellisError as error:
        print(f"trellis: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trellis", description=trellis.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"trellis {trellis.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    commands.add_parser("serve", help="start a server (see `trellis serve --help`)")
    for name, run, text in (
        ("stats", _stats, "what a running server has computed, cached and forced"),
        ("flush", _flush, "drop every cached prefix that no request uses"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--url", default=DEFAULT_URL, help=f"base URL of the server ({DEFAULT_URL})")
        command.add_argument("--api-key", default=None, help="the server's key, if it wants one")
        command.set_defaults(run=run)
    return parser


def _stats(options: argparse.Namespace) -> int:
    print(json.dumps(_call(options, "GET", "/server_info"), indent=2))
    return 0


def _flush(options: argparse.Namespace) -> int:
    print(json.dumps(_call(options, "POST", "/flush_cache")))
    return 0


def _call(options: argparse.Namespace, method: str, path: str) -> object:
    import httpx

    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    url = options.url.rstrip("/") + path
    try:
        response = httpx.request(method, url, headers=headers, timeout=30)
    except httpx.HTTPError as error:
        raise BackendError(f"no answer from {url}: {error}") from error
    if response.is_error:
        raise BackendError(
            f"{url} answered {response.status_code}: {response.text[:500]}", response.status_code
        )
    return response.json()


if __name__ == "__main__":
    sys.exit(main())
