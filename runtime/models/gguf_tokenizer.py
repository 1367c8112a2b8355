"""Building a tokenizer from the metadata of a GGUF file.

The file names its pre-tokenizer (``tokenizer.ggml.pre``), the rule that cuts text into words before the merges;
a wrong one gives other ids for the same text. The rules here follow the models' own published tokenizers.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from trellis.errors import ModelLoadError
from trellis.runtime.models.byte_tokens import SPACE_MARK
from trellis.runtime.models.gguf_file import GGUFFile

CONTROL, USER_DEFINED, UNKNOWN = 3, 4, 2  # values of tokenizer.ggml.token_type

# Splits a word boundary before each match; the byte-level step then only spells bytes.
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")

GPT2_RULES = {"default", "gpt-2", "gpt2", "olmo", "mpt", "phi-2", "jina-es", "jina-de"}
DIGIT_RULES = {"smollm", "starcoder", "refact", "command-r", "codeshell"}
REGEX_RULES = {
    "llama-bpe": LLAMA3_WORDS,
    "llama3": LLAMA3_WORDS,
    "llama-v3": LLAMA3_WORDS,
    "dbrx": LLAMA3_WORDS,
    "smaug-bpe": LLAMA3_WORDS,
    "qwen2": QWEN2_WORDS,
    "deepseek-r1-qwen": QWEN2_WORDS,
    "stablelm2": QWEN2_WORDS,
}
# These look a whole word up in the vocabulary before they merge, and put BOS in front unless told otherwise.
WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3"}


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer of a GGUF file. ModelLoadError if the file has none or its kind is unknown."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise ModelLoadError(f"{file.path} has no tokenizer (no tokenizer.ggml.model)")
    for key in ("tokens", *(["scores"] if kind == "llama" else [])):
        if f"tokenizer.ggml.{key}" not in file.metadata:
            raise ModelLoadError(f"{file.path} has a tokenizer without its {key} (tokenizer.ggml.{key})")
    if kind == "gpt2":
        backend = _byte_level(file)
    elif kind == "llama":
        backend = _sentencepiece(file)
    else:
        raise ModelLoadError(
            f"{file.path}: tokenizer.ggml.model {kind!r} is not supported; known: gpt2, llama"
        )
    _add_special_tokens(backend, file)
    return backend


def adds_bos(file: GGUFFile) -> bool:
    """Whether encoding a text puts BOS in front: the file's word, or the habit of its kind of tokenizer."""
    said = file.metadata.get("tokenizer.ggml.add_bos_token")
    if said is not None:
        return bool(said)
    return (
        file.metadata.get("tokenizer.ggml.model") == "llama"
        or file.metadata.get("tokenizer.ggml.pre") in WHOLE_WORDS_FIRST
    )


def _byte_level(file: GGUFFile) -> Tokenizer:
    rule = str(file.metadata.get("tokenizer.ggml.pre", "default"))
    words = _pre_tokenizer(rule, file)
    vocabulary = {token: i for i, token in enumerate(file.metadata["tokenizer.ggml.tokens"])}
    merges = [line.partition(" ")[::2] for line in file.metadata.get("tokenizer.ggml.merges", ())]
    backend = Tokenizer(_merging(file, vocabulary, merges, ignore_merges=rule in WHOLE_WORDS_FIRST))
    backend.pre_tokenizer = words
    backend.decoder = decoders.ByteLevel()
    if rule in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
    return backend


def _merging(
    file: GGUFFile, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> models.BPE:
    try:
        return models.BPE(vocabulary, merges, **options)
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{file.path}: vocabulary and merges do not fit together: {error}") from error


def _pre_tokenizer(rule: str, file: GGUFFile) -> pre_tokenizers.PreTokenizer:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule in GPT2_RULES:
        return gpt2
    if rule in DIGIT_RULES:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if rule in REGEX_RULES:
        words = pre_tokenizers.Split(Regex(REGEX_RULES[rule]), behavior="isolated")
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([words, spell])
    known = ", ".join(sorted(GPT2_RULES | DIGIT_RULES | set(REGEX_RULES)))
    raise ModelLoadError(
        f"{file.path}: pre-tokenizer {rule!r} is not supported (known: {known}); "
        "load the model from its Hugging Face directory, whose tokenizer.json says how text is split"
    )


def _sentencepiece(file: GGUFFile) -> Tokenizer:
    """A SentencePiece BPE vocabulary: pieces with scores, spaces as ``▁``, unknown characters as byte tokens."""
    tokens = file.metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id")
    backend = Tokenizer(
        _merging(
            file,
            vocabulary,
            _merges_by_score(vocabulary, file.metadata["tokenizer.ggml.scores"]),
            unk_token=tokens[unknown] if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", SPACE_MARK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), spaces]) if prefix else spaces
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges_by_score(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union has the best score; as merges: every way to split each piece
    into two pieces, best pieces first. O(total characters)."""
    merges: list[tuple[float, int, int, int, str, str]] = []
    for piece, token_id in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[token_id], token_id, vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _add_special_tokens(backend: Tokenizer, file: GGUFFile) -> None:
    tokens = file.metadata["tokenizer.ggml.tokens"]
    types = file.metadata.get("tokenizer.ggml.token_type", ())
    special = {CONTROL, UNKNOWN}
    added = [
        AddedToken(token, special=kind in special, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in special or kind == USER_DEFINED
    ]
    backend.add_tokens(added)
