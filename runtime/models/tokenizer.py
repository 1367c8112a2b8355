"""Text to token ids and back, for one model; thread-safe after construction."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from trellis.chat_format import ChatFormat
from trellis.chat_templates import get_chat_template
from trellis.errors import InvalidRequestError, ModelLoadError
from trellis.fsm.contract import Vocabulary
from trellis.runtime.models.byte_tokens import token_bytes
from trellis.runtime.models.chat_format import derive_chat_format
from trellis.runtime.models.chat_template import PLAIN_TEMPLATE, ChatTemplate, check_template
from trellis.runtime.models.gguf_file import GGUFFile, damage_reported, open_model
from trellis.runtime.models.gguf_tokenizer import adds_bos, build_tokenizer


class Tokenizer:
    """A model's tokenizer and chat template.

    backend: the `tokenizers` object. vocab_size: width of a logits row; ids without a token have no bytes.
    prefix: ids that encoding puts in front (BOS, or nothing). chat_template: Jinja source, or a chat format that takes
        its place; None for a model without one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Iterable[int],
        bos_token_id: int | None = None,
        prefix: Sequence[int] = (),
        vocab_size: int = 0,
        chat_template: str | ChatFormat | None = None,
    ) -> None:
        self.backend = backend
        self.vocab_size = vocab_size or backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = frozenset(eos_token_ids)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.token_bytes = token_bytes(backend, self.vocab_size)
        self.has_chat_template = chat_template is not None
        self._prefix = list(prefix)
        self._format = chat_template if isinstance(chat_template, ChatFormat) else None
        source = chat_template if isinstance(chat_template, str) and chat_template else PLAIN_TEMPLATE
        self._template = ChatTemplate(source, self._template_variables())
        self._derived: tuple[date | None, ChatFormat] | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``. Special tokens written in it (``<|im_start|>``) become their ids.

        add_special_tokens: put BOS in front where the model's tokenizer does so, unless the text begins with it.
        Raises InvalidRequestError for text that is not valid Unicode (a lone surrogate).
        """
        ids = self._encode(self.backend, text)
        if add_special_tokens and ids[: len(self._prefix)] != self._prefix:
            return self._prefix + ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of ``text`` with no special token among them: ``<|im_end|>`` is then ten characters like any other."""
        ids = self._encode(self.backend, text)
        if self.special_token_ids.isdisjoint(ids):
            return ids
        return self._encode(self._plain_backend, text)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; bytes that are not UTF-8 become U+FFFD. A SentencePiece vocabulary that puts a space in
        front of every text loses it again here."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as text. Raises InvalidRequestError when the model's template refuses it."""
        if self._format is not None:
            try:
                return self._format.render(messages, add_generation_prompt)
            except InvalidRequestError as error:
                raise InvalidRequestError("messages", error.reason) from None
        return self._template.render(messages, add_generation_prompt)

    def chat_format(self) -> ChatFormat:
        """The chat template as prefixes and suffixes of roles; ``exact`` says whether that is the whole truth."""
        # A template may write today's date.
        day = date.today() if "strftime_now" in self._template.source else None
        if self._derived is None or self._derived[0] != day:
            bos = self._template.variables["bos_token"]
            self._derived = (day, self._format or derive_chat_format(self._template, bos))
        return self._derived[1]

    def vocabulary(self) -> Vocabulary:
        """The tokenizer as constraints see it: special tokens have no bytes."""
        return self._vocabulary

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        hidden = self.special_token_ids | self.eos_token_ids
        visible = [b"" if i in hidden else data for i, data in enumerate(self.token_bytes)]
        digest = hashlib.sha256(repr((sorted(self.eos_token_ids), self.vocab_size)).encode())
        for data in visible:
            digest.update(len(data).to_bytes(4, "little") + data)
        return Vocabulary(
            token_bytes=visible,
            size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            encode=self.encode_plain,
            fingerprint=digest.hexdigest(),
        )

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        # A copy, since the switch is a property of the whole object. Made only when a text spells a special token.
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.encode_special_tokens = True
        return backend

    def _template_variables(self) -> dict[str, str]:
        variables = {"bos_token": "", "eos_token": ""}
        if self.bos_token_id is not None:
            variables["bos_token"] = self.token_bytes[self.bos_token_id].decode()
        if self.eos_token_ids:
            variables["eos_token"] = self.token_bytes[min(self.eos_token_ids)].decode()
        return variables

    @staticmethod
    def _encode(backend: tokenizers.Tokenizer, text: str) -> list[int]:
        try:
            return backend.encode(text, add_special_tokens=False).ids
        except TypeError as error:  # what the library makes of a string that UTF-8 cannot spell
            place = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
            if place is None:
                raise
            raise InvalidRequestError(
                "text", f"character {place} is a lone surrogate, which is not Unicode text"
            ) from error


def load_tokenizer(model: Path | GGUFFile, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a GGUF file or a Hugging Face directory. chat_template: instead of the model's own (see
    ``find_chat_template``). Raises ModelLoadError, InvalidRequestError for a chat template that is none."""
    chosen = None if chat_template is None else find_chat_template(chat_template)
    opened = open_model(model)
    if isinstance(opened, Path):
        return _from_directory(opened, chosen)
    with damage_reported(opened.path):
        return from_gguf(opened, chosen)


def find_chat_template(name: str) -> str | ChatFormat:
    """The Jinja source in a file, or the chat format of that name. Raises InvalidRequestError."""
    path = Path(name)
    if not path.is_file():
        try:
            return get_chat_template(name)
        except InvalidRequestError as error:
            raise InvalidRequestError("chat_template", f"there is no such file, and {error.reason}") from None
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError("chat_template", f"{name} cannot be read: {error}") from error
    check_template(source, name)
    return source


def from_gguf(file: GGUFFile, chat_template: str | ChatFormat | None = None) -> Tokenizer:
    """The tokenizer that a GGUF file describes."""
    get = file.metadata.get
    backend = build_tokenizer(file)
    size = len(file.metadata["tokenizer.ggml.tokens"])
    bos = get("tokenizer.ggml.bos_token_id")
    ends = [get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return Tokenizer(
        backend,
        eos_token_ids=[end for end in ends if end is not None and end < size],
        bos_token_id=bos,
        prefix=[bos] if bos is not None and adds_bos(file) else [],
        vocab_size=size,
        chat_template=chat_template or get("tokenizer.chat_template"),
    )


def _from_directory(path: Path, chat_template: str | ChatFormat | None) -> Tokenizer:
    source = path / "tokenizer.json"
    if not source.is_file():
        raise ModelLoadError(f"{path} has no tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(source))
    except Exception as error:  # the library raises bare Exception for what it cannot parse
        raise ModelLoadError(f"{source} cannot be read: {error}") from error
    settings = read_json(path / "tokenizer_config.json")
    model = read_json(path / "config.json")
    size = int(model.get("vocab_size") or backend.get_vocab_size(with_added_tokens=True))
    bos = _token_id(backend, settings.get("bos_token"), model.get("bos_token_id"))
    if bos is not None and not 0 <= bos < size:
        raise ModelLoadError(f"{path}: bos_token_id must be one of the {size} tokens, from 0 on, not {bos}")
    ends = _eos_ids(backend, settings, model, read_json(path / "generation_config.json"))
    return Tokenizer(
        backend,
        eos_token_ids=[end for end in ends if 0 <= end < size],
        bos_token_id=bos,
        prefix=_prefix(backend, settings, bos),
        vocab_size=size,
        chat_template=chat_template or _chat_template(path, settings),
    )


def _eos_ids(
    backend: tokenizers.Tokenizer, settings: dict[str, Any], model: dict[str, Any], generation: dict[str, Any]
) -> set[int]:
    """Every id that one of the files calls the end of a text."""
    ends: set[int] = set()
    for source in (generation, model):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(end) is int for end in ids):
            raise ModelLoadError(f"eos_token_id must be a token id or a list of them, not {value!r}")
        ends.update(ids)
    named = _token_id(backend, settings.get("eos_token"), None)
    return ends if named is None else ends | {named}


def _token_id(backend: tokenizers.Tokenizer, token: Any, default: Any) -> int | None:
    """Id of a token that a config file names, as a string or as an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    found = backend.token_to_id(content) if content else None
    value = default if found is None else found
    return int(value) if isinstance(value, int) else None


def _prefix(backend: tokenizers.Tokenizer, settings: dict[str, Any], bos: int | None) -> list[int]:
    """What encoding puts in front: the config's word, or what the tokenizer's post-processor does."""
    said = settings.get("add_bos_token")
    if said is not None:
        return [bos] if said and bos is not None else []
    with_special, bare = backend.encode("a").ids, backend.encode("a", add_special_tokens=False).ids
    for cut in range(len(with_special) - len(bare) + 1):
        if with_special[cut : cut + len(bare)] == bare:
            return with_special[:cut]
    return []


def _chat_template(path: Path, settings: dict[str, Any]) -> str | None:
    source = path / "chat_template.jinja"
    if source.is_file():
        return source.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if the file is not there. Raises ModelLoadError if it is not JSON."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return value
