"""``trellis cache show``: the prefix cache of a running server, as text, JSON or a picture."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from trellis import cache_picture
from trellis.cache_tree import read_tree
from trellis.errors import BackendError
from trellis.server_call import add_server_arguments, call_server

DRAWERS = {"text": cache_picture.text, "svg": cache_picture.svg, "html": cache_picture.html}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``cache`` to the command line."""
    cache = commands.add_parser("cache", help="look into the prefix cache of a running server")
    verbs = cache.add_subparsers(required=True, metavar="verb")
    show = verbs.add_parser(
        "show",
        help="draw the radix tree",
        description="Draw the live radix tree: what each edge says, its tokens, hits, locks and the time since its "
        "last use. Of a large tree the nodes with the most hits are shown.",
    )
    add_server_arguments(show)
    show.add_argument(
        "--format", choices=["json", *DRAWERS], help="default: by the name of the file, else text"
    )
    show.add_argument("-o", "--output", metavar="FILE", help="default: standard output")
    show.add_argument("--namespace", metavar="LABEL", help="only this one; '' for what has none")
    show.add_argument("--max-nodes", type=int, default=200, help="nodes to show at most (200)")
    show.set_defaults(run=_show)


def _show(options: argparse.Namespace) -> int:
    query = {"limit": options.max_nodes}
    if options.namespace is not None:
        query["namespace"] = options.namespace.removeprefix("#")
    answer = call_server(options, "GET", "/cache/tree", query)
    kind = options.format or Path(options.output or "").suffix.removeprefix(".")
    if kind == "json":
        drawn = json.dumps(answer, indent=2) + "\n"
    else:
        try:
            drawn = DRAWERS.get(kind, cache_picture.text)(read_tree(answer))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BackendError(f"{options.url} did not answer as /cache/tree does: {error!r}") from None
    if options.output is None:
        sys.stdout.write(drawn)
        return 0
    try:
        Path(options.output).write_text(drawn, encoding="utf-8")
    except OSError as error:
        print(f"trellis cache: --output: {error}", file=sys.stderr)
        return 2
    return 0
