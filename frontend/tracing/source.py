"""The syntax tree of a Python function, from its source file, if that is what the function was compiled from."""

from __future__ import annotations

import ast
import copy
import linecache
import types
from collections.abc import Iterator

from trellis.frontend.tracing.stop import Untraceable

_FUTURE = 0x1FE0000  # the flags that `from __future__ import ...` sets on a code object


class Sources:
    """The source files that one trace has read."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[ast.Module, types.CodeType]] = {}

    def function_node(self, function: types.FunctionType) -> ast.FunctionDef | ast.AsyncFunctionDef:
        """The ``def`` of a function, to be changed at will. Untraceable if there is none, or if the file is not what is
        running."""
        code = function.__code__
        name = f"{code.co_name}()"
        module, compiled = self._file(function, name)
        node = next((n for n in ast.walk(module) if _is_at(n, code)), None)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            raise Untraceable(f"{name} is not written as a def")
        if not any(c.co_code == code.co_code and c.co_names == code.co_names for c in _codes(compiled, code)):
            raise Untraceable(
                f"{name} is not what its source says: the file has changed, or a tool rewrote it"
            )
        return copy.deepcopy(node)

    def _file(self, function: types.FunctionType, name: str) -> tuple[ast.Module, types.CodeType]:
        file, flags = function.__code__.co_filename, function.__code__.co_flags & _FUTURE
        if file not in self._files:
            lines = linecache.getlines(file, function.__globals__)
            if not lines:
                raise Untraceable(f"the source of {name} is not there to be read")
            try:
                module = ast.parse("".join(lines), file)
                self._files[file] = (module, compile(module, file, "exec", flags, dont_inherit=True))
            except (SyntaxError, ValueError, RecursionError):
                raise Untraceable(f"the source of {name} cannot be parsed") from None
        return self._files[file]


def _is_at(node: ast.AST, code: types.CodeType) -> bool:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.name != code.co_name:
        return False
    return min([node.lineno, *(d.lineno for d in node.decorator_list)]) == code.co_firstlineno


def _codes(within: types.CodeType, like: types.CodeType) -> Iterator[types.CodeType]:
    """Code objects inside another one, of the same name and line."""
    for constant in within.co_consts:
        if isinstance(constant, types.CodeType):
            if (constant.co_name, constant.co_firstlineno) == (like.co_name, like.co_firstlineno):
                yield constant
            yield from _codes(constant, like)
