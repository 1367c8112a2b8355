"""The last look at a constrained text: does it say what the user asked for?

Masks are made from what an engine understood of a constraint. Where the constraint itself can be asked
(``ChecksText``), the finished text is held against it, so that a defect of an engine is an error and a
number in the statistics, and never a wrong answer that nobody notices.
"""

from __future__ import annotations

import logging

from trellis.fsm.contract import ChecksText, Vocabulary
from trellis.runtime.messages import FinishReason, GrammarReport
from trellis.runtime.scheduler.counters import Counters
from trellis.runtime.scheduler.request import Request

logger = logging.getLogger(__name__)


def conclude(
    request: Request, finish: FinishReason | None, vocabulary: Vocabulary, counters: Counters
) -> tuple[FinishReason | None, GrammarReport | None]:
    """How the request really ends, and what there is to say about its grammar.

    A text that breaks an enforced constraint ends with ``error``. Where a part was only validated
    (``strict`` is off) it ends as before, and a warning says what is wrong. Texts that were cut (by their
    length, a stop string or a stop token) are not looked at.
    """
    grammar = request.grammar
    if grammar is None or finish is None:
        return finish, None
    warnings = list(grammar.warnings)
    validated_only: list[str] = []
    if isinstance(grammar, ChecksText):
        validated_only = list(grammar.validated_only)
        wrong = _wrong(request, finish, grammar, vocabulary)
        if wrong is not None and validated_only:
            warnings.append(f"the text does not satisfy the constraint: {wrong}")
        elif wrong is not None:
            counters.constraint_misses += 1
            logger.error("request %s: %s let a wrong text through: %s", request.rid, grammar.engine, wrong)
            message = f"the {grammar.engine} engine let a text through that breaks its constraint: {wrong}"
            finish = FinishReason("error", message=message, status=500)
    return finish, GrammarReport(grammar.engine, warnings, validated_only)


def _wrong(request: Request, finish: FinishReason, grammar: ChecksText, vocabulary: Vocabulary) -> str | None:
    """What is wrong with a complete text; None if nothing is, or if the text was cut."""
    eos, spelling = vocabulary.eos_token_ids, vocabulary.token_bytes
    if finish.type != "stop" or not (finish.matched is None or finish.matched in eos):
        return None
    output = request.tokens.view(request.prompt_len).tolist()
    data = b"".join(spelling[token] for token in output if token not in eos and token < len(spelling))
    data = data[len(request.healing.overlap) :] if request.healing is not None else data
    try:
        return grammar.validate(data.decode())
    except UnicodeDecodeError:
        return "it is not UTF-8"
    except Exception as error:
        logger.exception("request %s: its final check failed", request.rid)
        return f"it could not be checked: {type(error).__name__}"
