"""The ``trellis`` command: ``serve`` starts a server, ``grammar`` tries constraints, the others talk to a server."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import trellis
from trellis import cache_command, grammar_command
from trellis.errors import TrellisError
from trellis.server_call import add_server_arguments, call_server


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (2: a mistake in the arguments)."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["serve"]:  # the server owns its flags
        from trellis.launch_server import main as serve

        return serve(args[1:], prog="trellis serve")
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
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        add_server_arguments(command)
        command.set_defaults(run=run)
        if run is _stats:
            command.add_argument("--json", action="store_true", help="everything, as JSON")
    cache_command.add_parser(commands)
    grammar_command.add_parser(commands)
    return parser


def _stats(options: argparse.Namespace) -> int:
    info = call_server(options, "GET", "/server_info")
    print(json.dumps(info, indent=2) if options.json else summary(info))
    return 0


def _flush(options: argparse.Namespace) -> int:
    print(json.dumps(call_server(options, "POST", "/flush_cache")))
    return 0


def summary(info: Mapping[str, Any]) -> str:
    """The lines of ``trellis stats``, from the answer of ``/server_info``."""
    output = info["sampled_tokens"] + info["forced_tokens"]
    grammars = info["grammars"]
    return "\n".join(
        [
            f"requests  {info['requests']} so far, {info['running_requests']} running, "
            f"{info['waiting_requests']} waiting, {info['aborted']} aborted, {info['refused']} refused",
            f"prompts   {info['prompt_tokens']} tokens came in; {info['cached_tokens']} were found in the cache "
            f"({info['hit_rate']:.0%}) and {info['computed_prompt_tokens']} computed",
            f"output    {output} tokens, of them {info['forced_tokens']} forced and {info['sampled_tokens']} "
            f"sampled, in {info['forward_passes']} forward passes",
            f"drafts    {info['drafted_tokens']} tokens computed ahead, of them {info['accepted_draft_tokens']} right",
            f"grammars  {grammars['compiled']} compiled, {grammars['refused']} refused, "
            f"{grammars['cancelled']} given up",
            f"pool      {info['pool_tokens']} slots: {info['free_tokens']} free, {info['evictable_tokens']} cached, "
            f"{info['protected_tokens'] + info['private_tokens']} in use",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
