"""The ``xgrammar`` engine: context-free grammars in GBNF, parsed byte for byte.

xgrammar is used with guards around it. The grammar is read here and written again (``gbnf_rules``): trimmed
of what can never be completed, with a root of its own. It is compiled where it can be stopped
(``xgrammar_process``). Special tokens have no bytes in the vocabulary that it gets, so they are no text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from trellis.fsm.charset import EVERYTHING, Ranges
from trellis.fsm.contract import ConstraintSpec, Grammar, Vocabulary
from trellis.fsm.gbnf import Node, parse, refuse
from trellis.fsm.gbnf_rules import check_lengths, check_size, trim, write
from trellis.fsm.limits import Budget, Limits
from trellis.fsm.spelling import spelling_of
from trellis.fsm.trie import TokenTrie, trie_of
from trellis.fsm.xgrammar_matcher import XGrammarGrammar
from trellis.fsm.xgrammar_process import CompilerProcess, Job


class XGrammarEngine:
    """An ``Engine`` (see ``registry``) for grammars in GBNF. Needs the extra ``ebnf``."""

    name = "xgrammar"
    kinds = frozenset({"ebnf"})

    def compile(self, spec: ConstraintSpec, vocabulary: Vocabulary, limits: Limits) -> Grammar:
        """Raises ConstraintError: ``syntax``, ``unsupported``, ``limit``, ``empty`` or ``timeout``."""
        nbytes = len(spec.source.encode("utf-8", "surrogatepass"))
        if nbytes > limits.grammar_bytes:
            reason = f"the grammar has {nbytes} bytes; at most {limits.grammar_bytes} are allowed"
            raise refuse("limit", "", reason)
        budget = Budget("grammar", limits)
        budget.start(limits.compile_s)
        rules = parse(spec.source, limits)
        check_size(rules, limits)
        if find_spec("xgrammar") is None:
            reason = "GBNF grammars need xgrammar, which is not installed: pip install 'trellis-lm[ebnf]'"
            raise refuse("unsupported", "", reason)
        tokens = tokens_of(vocabulary)
        text = _text(rules, tokens.alphabet, limits, budget)
        compiled = tokens.compiled(text, limits)
        return XGrammarGrammar(compiled, _whole(rules, tokens, limits), tokens.trie, limits, [])


def _text(rules: dict[str, Node], alphabet: Ranges, limits: Limits, budget: Budget) -> str:
    written = trim(rules, alphabet, budget)
    if not written:
        if not trim(rules, EVERYTHING, budget):
            raise refuse("empty", "", "no text satisfies the grammar: its rules never come to an end")
        reason = "every text of the grammar needs a character that this model's vocabulary cannot write"
        raise refuse("empty", "", reason)
    check_lengths(written, limits, budget)
    return write(written)


def _whole(rules: dict[str, Node], tokens: Tokens, limits: Limits) -> Callable[[], Any]:
    """Makes the grammar over all characters, for ``accepts``."""

    def make() -> Any:
        budget = Budget("grammar", limits)
        budget.start(limits.compile_s)
        return tokens.compiled(_text(rules, EVERYTHING, limits, budget), limits, with_tokens=False)

    return make


@dataclass(frozen=True)
class Tokens:
    """A vocabulary as xgrammar gets it. alphabet: the characters that it can write."""

    trie: TokenTrie
    alphabet: Ranges
    info: Any
    bare: Any
    process: CompilerProcess

    def compiled(self, text: str, limits: Limits, with_tokens: bool = True) -> Any:
        """The ``xgrammar.CompiledGrammar``; raises ConstraintError."""
        import xgrammar

        job = Job(text, with_tokens, limits.compile_s, limits.mask_s)
        serialised = self.process.compile(job, limits.check_wanted)
        info = self.info if with_tokens else self.bare
        compiled = xgrammar.CompiledGrammar.deserialize_json(serialised, info)
        if compiled.memory_size_bytes > limits.memory_bytes:
            reason = f"the compiled grammar has more than {limits.memory_bytes} bytes; simplify it"
            raise refuse("limit", "", reason)
        return compiled


@lru_cache(maxsize=4)
def tokens_of(vocabulary: Vocabulary) -> Tokens:
    import xgrammar

    spelling = spelling_of(vocabulary)
    if not spelling.bytewise:
        # A token that ends inside a character may be one that no other token completes.
        vocabulary = _whole_characters(vocabulary)
        spelling = spelling_of(vocabulary)
    trie = trie_of(vocabulary)
    stop = sorted(vocabulary.eos_token_ids)
    raw = xgrammar.VocabType.RAW
    info = xgrammar.TokenizerInfo(trie.data, raw, vocab_size=vocabulary.size, stop_token_ids=stop)
    process = CompilerProcess(trie.data, vocabulary.size, stop)
    return Tokens(trie, spelling.alphabet, info, xgrammar.TokenizerInfo([], raw), process)


def _whole_characters(vocabulary: Vocabulary) -> Vocabulary:
    """The vocabulary without tokens that begin or end inside a character."""

    def whole(data: bytes) -> bytes:
        try:
            data.decode()
        except UnicodeDecodeError:
            return b""
        return data

    data = [whole(bytes(token)) for token in vocabulary.token_bytes]
    return replace(vocabulary, token_bytes=data, fingerprint=f"{vocabulary.fingerprint}/characters")
