"""The detokenizer's process: ``python -m trellis.runtime.server.detokenizer_process REPORT_FD``."""

from __future__ import annotations

import logging
import sys
import threading

from trellis.errors import ModelLoadError
from trellis.runtime.manager.detokenizer import Detokenizer
from trellis.runtime.manager.transport import ChannelFull, ZmqReceiver, ZmqSender
from trellis.runtime.messages import TextOutput, TokenOutput
from trellis.runtime.models import load_tokenizer, resolve_model_path
from trellis.runtime.server.child import (
    Report,
    Settings,
    end_with_parent,
    read_settings,
    report,
    set_up_logging,
)

logger = logging.getLogger(__name__)


def main() -> int:
    settings = read_settings()
    set_up_logging(settings.config["log_level"], "detokenizer")
    stopping = threading.Event()
    inbox: ZmqReceiver[TokenOutput] = ZmqReceiver(settings.inbox, TokenOutput)
    outbox: ZmqSender[TextOutput] = ZmqSender(settings.outbox)

    def stop() -> None:
        stopping.set()
        inbox.wake()

    end_with_parent(stop, settings)
    try:
        detokenizer = _load(settings)
    except ModelLoadError as error:
        report(Report(str(error), user_error=True))
        return 2
    report(Report())
    while not stopping.is_set():
        texts = detokenizer.process(inbox.receive(None))
        while texts and not stopping.is_set():
            try:
                outbox.send(texts, timeout=0.5)
                break
            except ChannelFull as full:
                logger.warning("texts wait: %s", full)
    inbox.close()
    outbox.close()
    return 0


def _load(settings: Settings) -> Detokenizer:
    return Detokenizer(load_tokenizer(resolve_model_path(settings.config["model_path"])))


if __name__ == "__main__":
    sys.exit(main())
