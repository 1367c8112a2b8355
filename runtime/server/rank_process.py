"""The process of a rank other than 0: ``python -m trellis.runtime.server.rank_process REPORT_FD``."""

from __future__ import annotations

import functools
import logging
import sys
import threading
from typing import TYPE_CHECKING

from trellis.errors import TrellisError
from trellis.runtime.assembly import load_runner, set_up_threads
from trellis.runtime.config import on_command_line
from trellis.runtime.distributed.contract import GroupBroken
from trellis.runtime.manager.transport import ZmqReceiver
from trellis.runtime.models import resolve_model_path
from trellis.runtime.models.gguf_file import open_model
from trellis.runtime.server.child import (
    Report,
    Settings,
    end_broken,
    end_with_parent,
    read_settings,
    report,
    set_up_logging,
)

if TYPE_CHECKING:
    from trellis.runtime.distributed.group import Group
    from trellis.runtime.executor.model_runner import StepRunner

logger = logging.getLogger(__name__)


def main() -> int:
    settings = read_settings()
    set_up_logging(settings.config["log_level"], f"rank-{settings.rank}")
    set_up_threads()
    # Only now, as it loads torch.
    from trellis.runtime.distributed.follower import Follower
    from trellis.runtime.distributed.wire import Message

    stopping = threading.Event()
    inbox: ZmqReceiver[Message] = ZmqReceiver(settings.inbox, Message)

    def stop() -> None:
        stopping.set()
        inbox.wake()

    end_with_parent(stop, settings)
    try:
        group, runner = _join(settings)
    except (TrellisError, ValueError) as error:
        report(Report(on_command_line(error), user_error=True))
        return 2
    except Exception as error:
        logger.exception("rank %d cannot start", settings.rank)
        report(Report(f"{type(error).__name__}: {error}"))
        return 1
    report(Report())
    try:
        Follower(runner, group).run(inbox, stopping)
    except GroupBroken as error:
        end_broken(error)
    runner.release()
    group.leave()
    stopping.wait()  # the parent takes an end that it did not ask for as a death
    inbox.close()
    return 0


def _join(settings: Settings) -> tuple[Group, StepRunner]:
    from trellis.runtime.distributed.join import join_group

    config, place = settings.server_config(), settings.place()
    if place is None:
        raise ValueError("a rank needs a group")
    model = open_model(resolve_model_path(config.model_path))
    return join_group(place, config.device, functools.partial(load_runner, config, model))


if __name__ == "__main__":
    sys.exit(main())
