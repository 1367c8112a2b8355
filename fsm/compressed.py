"""The ``compressed`` engine: regex and choices by a byte automaton that is built lazily and compressed.

A pattern becomes a syntax tree (``regex``); its states are sets of what is still to be matched
(``continuations``), spelled in UTF-8 (``utf8``), numbered and tabulated on demand (``dfa``), and seen through
the vocabulary's trie (``token_automaton``). A chain of states with one way on is one edge of bytes, which
``forced`` turns into tokens.
"""

from __future__ import annotations

from trellis.errors import ConstraintError
from trellis.fsm.automaton import DEAD, START, ByteAutomaton
from trellis.fsm.charset import EVERYTHING, Ranges
from trellis.fsm.choices import read_options, writable_options
from trellis.fsm.contract import ConstraintSpec, Grammar, Vocabulary
from trellis.fsm.dfa import LazyDfa
from trellis.fsm.limits import Budget, Limits
from trellis.fsm.matcher import CompressedGrammar
from trellis.fsm.options import OptionsAutomaton
from trellis.fsm.regex import Regex, refuse
from trellis.fsm.regex_source import RegexSource
from trellis.fsm.spelling import spelling_of
from trellis.fsm.syntax import Builder
from trellis.fsm.token_automaton import TokenAutomaton
from trellis.fsm.trie import trie_of


class CompressedEngine:
    """An ``Engine`` (see ``registry``) for regular expressions and lists of options."""

    name = "compressed"
    kinds = frozenset({"regex", "choices"})

    def compile(self, spec: ConstraintSpec, vocabulary: Vocabulary, limits: Limits) -> Grammar:
        """Raises ConstraintError: ``syntax``, ``unsupported``, ``limit``, ``empty`` or ``timeout``."""
        compiled = _choices if spec.kind == "choices" else _regex
        return compiled(spec.source, vocabulary, limits)


def _regex(pattern: str, vocabulary: Vocabulary, limits: Limits) -> CompressedGrammar:
    regex = Regex(pattern, limits)
    spelling = spelling_of(vocabulary)

    def make() -> TokenAutomaton:
        budget = Budget("regex", limits)
        automaton = _automaton(regex, spelling.alphabet, budget)
        return TokenAutomaton(automaton, trie_of(vocabulary), spelling.bytewise, budget)

    return CompressedGrammar(make, _RegexLanguage(regex, limits), vocabulary, [])


def _automaton(regex: Regex, alphabet: Ranges, budget: Budget) -> LazyDfa:
    """Raises ConstraintError, also ``empty``. alphabet: characters that may occur."""
    budget.start(budget.limits.compile_s)
    builder = Builder(alphabet, budget.tick)
    root = regex.asserting_tree(builder)
    if root is not builder.nothing:
        source = RegexSource(root, builder, budget)
        if not source.is_empty():
            return LazyDfa(source, budget)
    if alphabet != EVERYTHING:
        _automaton(regex, EVERYTHING, budget)  # if it is empty as well, that is the reason
        raise refuse("empty", "", "every match needs a character that this model's vocabulary cannot write")
    raise refuse("empty", "", "no text matches this pattern")


def byte_automaton(spec: ConstraintSpec, limits: Limits) -> ByteAutomaton:
    """The automaton of a regex or of choices over all characters, whatever a vocabulary can write.

    Raises ConstraintError, also while it is used.
    """
    if spec.kind == "choices":
        return OptionsAutomaton(read_options(spec.source, limits))
    return _automaton(Regex(spec.source, limits), EVERYTHING, Budget("regex", limits))


class _RegexLanguage:
    """The pattern's language over all characters, built when first asked for."""

    def __init__(self, regex: Regex, limits: Limits) -> None:
        self._regex = regex
        self._limits = limits
        self._budget = Budget("regex", limits)
        self._dfa: LazyDfa | None = None

    def __call__(self, data: bytes) -> bool:
        try:
            return self._accepts(data)
        except ConstraintError as error:
            if error.code != "limit":
                raise
            self._dfa = None  # used up by earlier texts: once more with an empty automaton
            return self._accepts(data)

    def _accepts(self, data: bytes) -> bool:
        if self._dfa is None:
            self._budget = Budget("regex", self._limits)
            self._budget.start(self._limits.compile_s)
            builder = Builder(EVERYTHING, self._budget.tick)
            source = RegexSource(self._regex.asserting_tree(builder), builder, self._budget, trim=False)
            self._dfa = LazyDfa(source, self._budget)
        self._budget.start(self._limits.compile_s)
        state = self._dfa.step(START, data)
        return state != DEAD and self._dfa.accepting(state)


def _choices(source: str, vocabulary: Vocabulary, limits: Limits) -> CompressedGrammar:
    options = read_options(source, limits)
    spelling = spelling_of(vocabulary)
    written, warnings = writable_options(options, spelling.alphabet)
    exact = frozenset(option.encode() for option in options)

    def make() -> TokenAutomaton:
        budget = Budget("choices", limits)
        return TokenAutomaton(OptionsAutomaton(written), trie_of(vocabulary), spelling.bytewise, budget)

    return CompressedGrammar(make, exact.__contains__, vocabulary, warnings)
