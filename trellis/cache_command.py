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
SUFFIXES = {"": "text", ".txt": "text", ".svg": "svg", ".html": "html", ".json": "json"}  # of --output


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
        "--format", choices=["json", *DRAWERS], help="default: by the ending of the file's name, else text"
    )
    show.add_argument("-o", "--output", metavar="FILE", help="default: standard output")
    show.add_argument("--namespace", metavar="LABEL", help="only this one; '' for what has none")
    show.add_argument("--max-nodes", type=int, default=200, help="nodes to show at most, up to 5,000 (200)")
    show.set_defaults(run=_show)


def _show(options: argparse.Namespace) -> int:
    kind = options.format or SUFFIXES.get(Path(options.output or "").suffix)
    if kind is None:
        endings = ", ".join(filter(None, SUFFIXES))
        return _mistake(
            f"--output: cannot tell a format from '{options.output}'; end it in {endings}, or give --format"
        )
    query = {"limit": options.max_nodes}
    if options.namespace is not None:
        query["namespace"] = options.namespace.removeprefix("#")
    answer = call_server(options, "GET", "/cache/tree", query)
    if kind == "json":
        drawn = json.dumps(answer, indent=2) + "\n"
    else:
        try:
            tree = read_tree(answer)
            drawn = DRAWERS[kind](tree)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BackendError(f"{options.url} did not answer as /cache/tree does: {error!r}") from None
        if options.namespace and not tree.count:
            return _mistake(
                f"--namespace: nothing is cached under '{options.namespace}'; leave it out to see the labels"
            )
    if options.output is None:
        sys.stdout.write(drawn)
        return 0
    try:
        Path(options.output).write_text(drawn, encoding="utf-8")
    except OSError as error:
        return _mistake(f"--output: {error}")
    print(f"wrote {options.output}", file=sys.stderr)
    return 0


def _mistake(message: str) -> int:
    print(f"trellis cache: {message}", file=sys.stderr)
    return 2
