"""The scheduler's process: ``python -m trellis.runtime.server.scheduler_process REPORT_FD``."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable

from trellis.errors import TrellisError
from trellis.runtime.assembly import Assembly, assemble_settled
from trellis.runtime.config import on_command_line
from trellis.runtime.distributed.contract import GroupBroken
from trellis.runtime.executor.contract import DeviceLost
from trellis.runtime.loop import Command, SchedulerLoop
from trellis.runtime.manager.transport import ChannelFull, Sender, ZmqReceiver, ZmqSender
from trellis.runtime.messages import TokenOutput
from trellis.runtime.models import load_tokenizer, resolve_model_path
from trellis.runtime.models.gguf_file import open_model
from trellis.runtime.server import collector
from trellis.runtime.server.child import (
    Report,
    Settings,
    end_broken,
    end_with_parent,
    read_settings,
    report,
    set_up_logging,
)
from trellis.runtime.server.control import ControlServer

logger = logging.getLogger(__name__)


def main() -> int:
    settings = read_settings()
    set_up_logging(settings.config["log_level"], "scheduler")
    stopping = threading.Event()
    # The receiver exists before the model is loaded: a signal during the load must find something to stop.
    inbox: ZmqReceiver[Command] = ZmqReceiver(settings.inbox, Command)

    def stop() -> None:
        stopping.set()
        inbox.wake()

    end_with_parent(stop, settings)
    try:
        parts = _assemble(settings, inbox.wake)
    except (TrellisError, ValueError) as error:
        report(Report(on_command_line(error), user_error=True))
        return 2
    except Exception as error:
        logger.exception("the scheduler cannot start")
        report(Report(f"{type(error).__name__}: {error}"))
        return 1
    return _serve(parts, settings, inbox, stopping)


def _assemble(settings: Settings, wake: Callable[[], None]) -> Assembly:
    config = settings.server_config()
    model = open_model(resolve_model_path(config.model_path))
    return assemble_settled(config, model, load_tokenizer(model), wake, settings.place())


def _serve(
    parts: Assembly, settings: Settings, inbox: ZmqReceiver[Command], stopping: threading.Event
) -> int:
    outbox: ZmqSender[TokenOutput] = ZmqSender(settings.outbox)

    def when_idle() -> None:
        collector.catch_up()
        parts.stay_in_touch()

    loop = SchedulerLoop(
        parts.scheduler,
        inbox,
        lambda outputs: send_all(outbox, outputs, stopping),
        stopping,
        when_idle=when_idle,
    )
    control = ControlServer(settings.control, loop)
    control.start()
    collector.hold_back()
    report(Report())
    try:
        loop.run()
    except (GroupBroken, DeviceLost) as error:
        end_broken(error)
    except Exception:
        logger.exception("the scheduler ended with an error")
        return 1
    finally:
        control.close()
        parts.close()
        outbox.close()
        inbox.close()
    return 0


def send_all(sender: Sender[TokenOutput], outputs: list[TokenOutput], stopping: threading.Event) -> None:
    """Outputs are never dropped: wait for a receiver that is behind or being restarted, but not past a stop."""
    while not stopping.is_set():
        try:
            sender.send(outputs, timeout=0.5)
            return
        except ChannelFull as full:
            logger.warning("outputs wait: %s", full)


if __name__ == "__main__":
    sys.exit(main())
