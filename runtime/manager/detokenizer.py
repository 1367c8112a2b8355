"""From output tokens to text that is safe to show, request by request."""

from __future__ import annotations

import codecs
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from trellis.runtime.manager.stop_matches import StopMatches
from trellis.runtime.messages import DetokenizeOptions, FinishReason, TextOutput, TokenOutput


class TokenText(Protocol):
    """What a detokenizer needs of a tokenizer."""

    @property
    def token_bytes(self) -> Sequence[bytes]: ...

    @property
    def special_token_ids(self) -> Set[int]: ...


@dataclass(frozen=True)
class Ending:
    """How the final text relates to the tokens: the first kept_tokens spell it but for tail_text."""

    kept_tokens: int
    tail_text: str


class TextStream:
    """The text of one request, built from the bytes of its tokens.

    Never emits half a character: bytes that may be completed by the next token wait; bytes that cannot become
    a character turn into U+FFFD, as decoding the whole would do. Never emits what may become a stop string or the
    match of a stop pattern.
    The first ``skip_characters`` are the prompt's: they are no part of the text, and no stop string is in them.
    """

    def __init__(self, vocabulary: TokenText, options: DetokenizeOptions) -> None:
        self._bytes = vocabulary.token_bytes
        self._skipped: Set[int] = vocabulary.special_token_ids if options.skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        looks = options.stop or options.stop_regex
        self._stops = StopMatches(options.stop, options.stop_regex) if looks else None
        self.skipped = options.skip_characters
        self._to_skip = options.skip_characters
        self._held = ""  # decoded, may become a match
        self._since_mark = ""  # the text from the first boundary on
        self._length = 0  # characters decoded so far, held ones included
        self._tokens = 0
        # (tokens, characters): the fewest tokens that spell exactly so many characters. Only those within
        # reach of a later cut are kept: the last one at or before what is emitted, and all after it.
        self._boundaries = [(0, 0)]
        self._emitted = 0  # characters
        # Characters [start, end) that forced tokens gave, those that were not yet taken by ``forced_spans``.
        self._forced: list[tuple[int, int]] = []
        self._last_forced = False
        self.matched: str | None = None

    def feed(self, token_id: int, forced: bool = False) -> str:
        """The text that has become safe. After a stop string is complete (``matched``) there is no more."""
        if self.matched is not None:
            return ""
        self._tokens += 1
        self._last_forced = forced
        known = 0 <= token_id < len(self._bytes) and token_id not in self._skipped
        text = self._unskipped(self._decoder.decode(self._bytes[token_id]) if known else "")
        emitted = self._emit(text)
        if self.matched is None and not self._decoder.getstate()[0]:
            self._mark_boundary()
        return emitted

    def finish(self) -> str:
        """Flush what was held back; bytes of an unfinished character become U+FFFD."""
        if self.matched is not None:
            return ""
        unfinished = self._unskipped(self._decoder.decode(b"", final=True))
        emitted = self._emit(unfinished)
        if self.matched is None:
            if unfinished:
                self._mark_boundary()
            self._emitted += len(self._held)
            emitted, self._held = emitted + self._held, ""
        return emitted

    def forced_spans(self, count: int) -> list[tuple[int, int]]:
        """Which parts of the last ``count`` characters that were emitted come from forced tokens, as [start, end)
        within these. Each part is told once."""
        first, end = self._emitted - count, self._emitted
        spans = [(max(a, first) - first, min(b, end) - first) for a, b in self._forced if a < end]
        self._forced = [(max(a, end), b) for a, b in self._forced if b > end]
        return spans

    def ending(self) -> Ending:
        """Where a program goes on from; call after ``finish``."""
        tokens, characters = next(mark for mark in reversed(self._boundaries) if mark[1] <= self._length)
        return Ending(tokens, self._since_mark[len(self._since_mark) - (self._length - characters) :])

    def _unskipped(self, text: str) -> str:
        """What is left of newly decoded text after the characters that are the prompt's."""
        skip = min(self._to_skip, len(text))
        self._to_skip -= skip
        return text[skip:]

    def _emit(self, text: str) -> str:
        if text and self._last_forced:
            start = (
                self._forced.pop()[0]
                if self._forced and self._forced[-1][1] == self._length
                else self._length
            )
            self._forced.append((start, self._length + len(text)))
        safe = self._safe(text)
        self._emitted += len(safe)
        return safe

    def _safe(self, text: str) -> str:
        self._length += len(text)
        self._since_mark += text
        if self._stops is None:
            return text
        match = self._stops.feed(text)
        pending = self._held + text
        if match is None:
            safe = len(pending) - self._stops.held
        else:
            self.matched = match.stop
            safe = len(self._held) + match.end - match.length
            cut = len(pending) - safe
            self._length -= cut
            self._since_mark = self._since_mark[: len(self._since_mark) - cut]
        self._held = "" if match else pending[safe:]
        return pending[:safe]

    def _mark_boundary(self) -> None:
        """Note that token and character boundary coincide here, and forget what no cut can reach."""
        if self._length > self._boundaries[-1][1]:  # else: the same text in fewer tokens is the better place
            self._boundaries.append((self._tokens, self._length))
        emitted = self._length - len(self._held)
        while len(self._boundaries) > 1 and self._boundaries[1][1] <= emitted:
            del self._boundaries[0]
        self._since_mark = self._since_mark[len(self._since_mark) - (self._length - self._boundaries[0][1]) :]


class Detokenizer:
    """``TokenOutput`` → ``TextOutput``, keeping a ``TextStream`` for every request that is under way."""

    def __init__(self, vocabulary: TokenText) -> None:
        self._vocabulary = vocabulary
        self._streams: dict[str, TextStream] = {}

    def __len__(self) -> int:
        """Requests under way."""
        return len(self._streams)

    def process(self, outputs: Sequence[TokenOutput]) -> list[TextOutput]:
        """Outputs of requests that are over (their stop string was found) give nothing."""
        texts = (self._process(output) for output in outputs)
        return [text for text in texts if text is not None]

    def _process(self, output: TokenOutput) -> TextOutput | None:
        stream = self._streams.get(output.rid)
        if stream is None:
            if output.options is None and output.finish is None:
                return None
            stream = TextStream(self._vocabulary, output.options or DetokenizeOptions([], True))
            self._streams[output.rid] = stream
        text = self._read(stream, output)
        finish = output.finish
        if stream.matched is not None:
            finish = FinishReason("stop", matched=stream.matched)
        result = TextOutput(
            rid=output.rid,
            text=text,
            token_ids=output.token_ids,
            counts=output.counts,
            logprobs=output.logprobs,
            top_logprobs=output.top_logprobs,
            input_logprobs=output.input_logprobs,
            input_top_logprobs=output.input_top_logprobs,
            finish=finish,
            forced_spans=stream.forced_spans(len(text)),
            grammar=output.grammar,
            healed_characters=stream.skipped,
        )
        if finish is not None:
            del self._streams[output.rid]
            ending = stream.ending()
            result.kept_tokens, result.tail_text = ending.kept_tokens, ending.tail_text
        return result

    @staticmethod
    def _read(stream: TextStream, output: TokenOutput) -> str:
        ids = output.token_ids
        forced = output.forced or [False] * len(ids)
        stop_token = output.finish.matched if output.finish and output.finish.type == "stop" else None
        without_text = bool(ids) and isinstance(stop_token, int) and ids[-1] == stop_token
        read = len(ids) - without_text
        text = "".join([stream.feed(ids[i], forced[i]) for i in range(read)])
        return text + stream.finish() if output.finish is not None else text
