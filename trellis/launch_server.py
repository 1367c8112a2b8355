"""``python -m trellis.launch_server --model-path smollm2-135m --port 30000``"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trellis.runtime.config import ServerConfig
    from trellis.runtime.models import Tokenizer

PROG = "trellis.launch_server"
USAGE_ERROR = 2
FAILURE = 1
INTERRUPTED = 130


def launch_server(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Serve until SIGTERM or Ctrl-C; the exit status.

    argv: flags as on the command line (default: those of this process). prog: how the command was spelled, for
    its help and its errors. Everything that the user can mend (a
    bad flag, a model that is not there, a port in use) is one line on stderr and status 2.
    """
    try:
        from trellis.runtime.config import parse_args
    except ImportError as error:
        return _fail(
            prog,
            f"the runtime is not installed ({error}); from the Trellis checkout: "
            "pip install '.[runtime]' -c constraints.txt",
        )
    _see_own_modules()
    try:
        config = parse_args(sys.argv[1:] if argv is None else argv, prog)
    except SystemExit as end:  # --help, or a bad flag: argparse has said what
        return end.code if isinstance(end.code, int) else USAGE_ERROR
    try:
        return _serve(config, prog)
    except KeyboardInterrupt:  # while the model loads; later, signals are the HTTP server's
        return _fail(prog, "interrupted", INTERRUPTED)


def _see_own_modules() -> None:
    """Let ``--schedule-policy`` name a module in the folder where the server is started: ``python -m`` looks there,
    an installed command does not. Last of all, so that no file there hides an installed module."""
    here = os.getcwd()
    if not {"", here} & set(sys.path):
        sys.path.append(here)


def _serve(config: ServerConfig, prog: str) -> int:
    from trellis.errors import TrellisError
    from trellis.runtime.assembly import settle
    from trellis.runtime.config import on_command_line
    from trellis.runtime.models import load_config, load_tokenizer, resolve_model_path
    from trellis.runtime.models.gguf_file import open_model
    from trellis.runtime.server.child import set_up_logging
    from trellis.runtime.server.listen import PortError, bind, url_of

    set_up_logging(config.log_level, "server")
    try:
        path = resolve_model_path(config.model_path)
        sock = bind(config.host, config.port)
        model = open_model(path)
        config = settle(config, load_config(model))
        print(f"trellis: loading {path.name}: {_plan(config)}", flush=True)
    except (TrellisError, PortError) as error:
        return _fail(prog, on_command_line(error))

    from trellis.runtime.server.supervisor import Supervisor

    failures: list[tuple[str, bool]] = []

    def load() -> Tokenizer:
        tokenizer = load_tokenizer(model, config.chat_template)
        tokenizer.chat_format()  # now, and not while requests wait for it
        return tokenizer

    def on_ready() -> None:
        print(f"trellis: ready, serving {config.model_name} on {url_of(sock)}", flush=True)

    def on_fatal(message: str, user_error: bool) -> None:
        failures.append((message, user_error))
        server.should_exit = True

    try:
        supervisor = Supervisor(config, load, on_ready, on_fatal)
    except TrellisError as error:
        return _fail(prog, on_command_line(error))
    try:
        # Only now, since the children load the model meanwhile.
        from trellis.runtime.server.app import create_app
        from trellis.runtime.server.http import HttpServer

        server = HttpServer(create_app(supervisor), config.log_level, supervisor.drain)
        supervisor.start()
        server.run(sockets=[sock])
    finally:
        supervisor.stop()
    if failures:
        message, user_error = failures[0]
        return _fail(prog, message, USAGE_ERROR if user_error else FAILURE)
    print("trellis: stopped", flush=True)
    return 0


def _plan(config: ServerConfig) -> str:
    kept = (
        config.dtype
        if config.quantization == "none"
        else f"{config.dtype} with {config.quantization} weights"
    )
    ranks = f"{config.tp_size} ranks of " if config.tp_size > 1 else ""
    return (
        f"{kept}, {ranks}{config.num_threads} threads, context {config.context_length} tokens, "
        f"cache {config.max_total_tokens} tokens, policy {config.schedule_policy}"
    )


def _fail(prog: str, message: str, status: int = USAGE_ERROR) -> int:
    print(f"{prog}: error: {message}", file=sys.stderr, flush=True)
    return status


main = launch_server

if __name__ == "__main__":
    sys.exit(main())
