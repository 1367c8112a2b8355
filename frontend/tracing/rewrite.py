"""Rewrites a Python function so that a tracer sees what it does.

Python cannot tell a value that it is being formatted into a plain string, compared with ``is``, or passed to a
function that will write a file. So the function's syntax tree is changed: such places ask the tracer first (``Hooks``).
Everything else runs as it stands.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Sequence
from typing import Any, Protocol

from trellis.frontend.tracing.source import Sources
from trellis.frontend.tracing.stop import Untraceable

HOOKS = "__trellis_hooks__"


class Hooks(Protocol):
    """What rewritten code calls. Each may raise Untraceable."""

    def text(self, *parts: Any) -> Any:
        """An f-string: strings, and (value, conversion, spec)."""

    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any: ...
    def attribute(self, value: Any, name: str) -> Any: ...
    def item(self, value: Any, key: Any) -> Any: ...
    def slice(self, start: Any, stop: Any, step: Any) -> slice: ...
    def identical(self, left: Any, right: Any) -> bool: ...
    def concrete(self, value: Any) -> Any: ...
    def iterable(self, value: Any) -> Any: ...
    def searched(self, value: Any) -> Any: ...
    def entered(self, value: Any) -> Any: ...
    def new(self, container: Any) -> Any: ...
    def changes(self, container: Any) -> None: ...
    def grows(self, value: Any) -> None: ...
    def imports(self, module: str) -> None: ...
    def tick(self) -> None: ...
    def stop(self, reason: str) -> None: ...


def rewritten_code(function: types.FunctionType, sources: Sources) -> types.CodeType:
    """The function's code with hooks. Untraceable if its source is not there, or not Python's plain kind."""
    node = sources.function_node(function)
    if any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in _own_nodes(node)):
        raise Untraceable(f"{node.name}() is a generator")
    parameters = _parameters([HOOKS, *function.__code__.co_freevars])
    outer = _def(HOOKS, parameters, [_Rewriter().function(_plain_def(node))])
    module = ast.Module(body=[outer], type_ignores=[])
    _locate(module, node.lineno, node.col_offset)
    compiled = compile(module, function.__code__.co_filename, "exec", dont_inherit=True)
    return _constant(_constant(compiled, HOOKS), node.name)


def with_hooks(function: types.FunctionType, code: types.CodeType, hooks: Hooks) -> types.FunctionType:
    """A function of the rewritten code. Its defaults, globals and closure are those of the original."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells[HOOKS] = types.CellType(hooks)
    closure = tuple(cells[name] for name in code.co_freevars)
    made = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def is_rewritten(function: types.FunctionType) -> bool:
    return HOOKS in function.__code__.co_freevars


def _constant(code: types.CodeType, name: str) -> types.CodeType:
    return next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)


def _own_nodes(node: ast.AST) -> list[ast.AST]:
    """Nodes of a function, without those of functions inside it."""
    found: list[ast.AST] = []
    waiting = list(ast.iter_child_nodes(node))
    while waiting:
        one = waiting.pop()
        found.append(one)
        if not isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(one))
    return found


def _parameters(names: Sequence[str]) -> ast.arguments:
    return ast.arguments(
        posonlyargs=[],
        args=[ast.arg(arg=name, annotation=None) for name in names],
        vararg=None,
        kwonlyargs=[],
        kw_defaults=[],
        kwarg=None,
        defaults=[],
    )


def _plain_def(node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.FunctionDef:
    """A ``def`` without decorators and annotations; its defaults are put on the function afterwards."""
    for each in ast.walk(node.args):
        if isinstance(each, ast.arg):
            each.annotation = None
    return ast.copy_location(_def(node.name, node.args, node.body), node)


def _def(name: str, parameters: ast.arguments, body: list[Any]) -> ast.FunctionDef:
    fields: dict[str, Any] = {"decorator_list": [], "returns": None}
    if "type_params" in ast.FunctionDef._fields:  # from Python 3.12 on
        fields["type_params"] = []
    return ast.FunctionDef(name=name, args=parameters, body=body, **fields)


def _locate(node: ast.AST, line: int, column: int) -> None:
    """Put every node that has no place where the one around it begins. (``ast.fix_missing_locations`` takes its end
    as well, and a call that goes over several lines is reported at the last of them.)"""
    waiting = [(node, line, column)]
    while waiting:
        node, line, column = waiting.pop()
        if "lineno" in node._attributes:
            if not hasattr(node, "lineno"):
                _put(node, line, column)
            line, column = node.lineno, node.col_offset  # type: ignore[attr-defined]
        waiting.extend((child, line, column) for child in ast.iter_child_nodes(node))


def _put(node: Any, line: int, column: int) -> None:
    node.lineno = node.end_lineno = line
    node.col_offset = node.end_col_offset = column


def _hook(name: str, *args: ast.expr, keywords: Sequence[ast.keyword] = ()) -> ast.Call:
    target = ast.Attribute(ast.Name(HOOKS, ast.Load()), name, ast.Load())
    return ast.Call(target, list(args), list(keywords))


def _loaded(target: ast.expr) -> ast.expr:
    """A target of an assignment, as an expression that reads it."""
    loaded: ast.expr = ast.parse(ast.unparse(target), mode="eval").body
    for node in ast.walk(loaded):
        if isinstance(node, ast.expr):
            _put(node, target.lineno, target.col_offset)
    return loaded


class _Rewriter(ast.NodeTransformer):
    def function(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """A function's body; the hooks stand first, so that every rewritten function can be told by its closure."""
        node.args.defaults = [self.visit(each) for each in node.args.defaults]
        node.args.kw_defaults = [each and self.visit(each) for each in node.args.kw_defaults]
        node.body = [ast.Expr(ast.Name(HOOKS, ast.Load())), *self._block(node.body)]
        return node

    def _block(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in statements:
            result = self.visit(statement)
            new = result if isinstance(result, list) else [result]
            for each in new:
                if not hasattr(each, "lineno"):
                    _put(each, statement.lineno, statement.col_offset)
            found.extend(new)
        return found

    def visit(self, node: ast.AST) -> Any:
        result = super().visit(node)
        if isinstance(node, ast.expr) and isinstance(result, ast.expr) and not hasattr(result, "lineno"):
            _put(result, node.lineno, node.col_offset)
        return result

    # -- expressions -------------------------------------------------------------------------------------------

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        return _hook("text", *map(self._part, node.values))

    def _part(self, part: ast.expr) -> ast.expr:
        if not isinstance(part, ast.FormattedValue):
            return part
        spec = self.visit(part.format_spec) if part.format_spec is not None else ast.Constant("")
        return ast.Tuple([self.visit(part.value), ast.Constant(part.conversion), spec], ast.Load())

    def visit_Call(self, node: ast.Call) -> ast.expr:
        args = [self.visit(each) for each in node.args]
        keywords = [ast.keyword(arg=k.arg, value=self.visit(k.value)) for k in node.keywords]
        return _hook("call", self.visit(node.func), *args, keywords=keywords)

    def visit_Starred(self, node: ast.Starred) -> ast.expr:
        if isinstance(node.ctx, ast.Load):
            node.value = _hook("iterable", self.visit(node.value))
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if not isinstance(node.ctx, ast.Load):
            return node
        return _hook("attribute", self.visit(node.value), ast.Constant(node.attr))

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        node.value = self.visit(node.value)
        node.slice = self.visit(node.slice)
        return _hook("item", node.value, node.slice) if isinstance(node.ctx, ast.Load) else node

    def visit_Slice(self, node: ast.Slice) -> ast.expr:
        bounds = (node.lower, node.upper, node.step)
        return _hook("slice", *(ast.Constant(None) if b is None else self.visit(b) for b in bounds))

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        node.left = self.visit(node.left)
        node.comparators = [self.visit(each) for each in node.comparators]
        if not any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            pairs = zip(node.ops, node.comparators, strict=True)
            node.comparators = [
                _hook("searched", c) if isinstance(op, (ast.In, ast.NotIn)) else c for op, c in pairs
            ]
            return node
        if len(node.ops) > 1:
            return _hook("stop", ast.Constant("compares several values by 'is' in one expression"))
        same = _hook("identical", node.left, node.comparators[0])
        return same if isinstance(node.ops[0], ast.Is) else ast.UnaryOp(ast.Not(), same)

    def _container(self, node: Any) -> ast.expr:
        self.generic_visit(node)
        if isinstance(getattr(node, "ctx", None), ast.Store):
            return node  # type: ignore[no-any-return]
        return _hook("new", node)

    visit_List = visit_Dict = visit_Set = visit_ListComp = visit_SetComp = visit_DictComp = _container

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.expr:
        # What is pure may be computed at once, and a list can be looked into.
        self.generic_visit(node)
        return _hook("new", ast.ListComp(node.elt, node.generators))

    def visit_comprehension(self, node: ast.comprehension) -> ast.comprehension:
        self.generic_visit(node)
        node.iter = _hook("iterable", node.iter)
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        self.generic_visit(node)
        node.body = ast.Subscript(
            ast.Tuple([ast.Name(HOOKS, ast.Load()), node.body], ast.Load()), ast.Constant(1), ast.Load()
        )
        return node

    def visit_Await(self, node: ast.Await) -> ast.expr:
        return self.visit(node.value)  # type: ignore[no-any-return]

    def _stops(self, node: ast.expr) -> ast.expr:
        return _hook("stop", ast.Constant(f"uses {type(node).__name__.lower()}"))

    visit_Yield = visit_YieldFrom = _stops

    def _checked(self, hook: str, node: ast.expr) -> ast.expr:
        call = _hook(hook, self.visit(node))
        _put(call, node.lineno, node.col_offset)
        return call

    # -- statements --------------------------------------------------------------------------------------------

    def visit_For(self, node: ast.For) -> list[ast.stmt]:
        node.iter = self._checked("iterable", node.iter)
        node.body = [ast.Expr(_hook("tick")), *self._block(node.body)]
        node.orelse = self._block(node.orelse)
        return [*self._stores([node.target]), node]

    def visit_While(self, node: ast.While) -> ast.stmt:
        node.test = self.visit(node.test)
        node.body = [ast.Expr(_hook("tick")), *self._block(node.body)]
        node.orelse = self._block(node.orelse)
        return node

    def visit_With(self, node: ast.With) -> list[ast.stmt]:
        for each in node.items:
            each.context_expr = self._checked("entered", each.context_expr)
        node.body = self._block(node.body)
        targets = [each.optional_vars for each in node.items if each.optional_vars is not None]
        return [*self._stores(targets), node]

    def visit_AsyncWith(self, node: ast.AsyncWith) -> list[ast.stmt]:
        return self.visit_With(ast.copy_location(ast.With(items=node.items, body=node.body), node))

    def visit_If(self, node: ast.If) -> ast.stmt:
        node.test = self.visit(node.test)
        node.body = self._block(node.body)
        node.orelse = self._block(node.orelse)
        return node

    def visit_Match(self, node: Any) -> ast.stmt:
        node.subject = self._checked("concrete", node.subject)
        for case in node.cases:
            case.guard = case.guard and self.visit(case.guard)
            case.body = self._block(case.body)
        return node  # type: ignore[no-any-return]

    def visit_Assign(self, node: ast.Assign) -> list[ast.stmt]:
        node.value = self.visit(node.value)
        if any(isinstance(target, (ast.Tuple, ast.List)) for target in node.targets):
            node.value = _hook("iterable", node.value)
        return [*self._stores(node.targets), node]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> list[ast.stmt]:
        if node.value is None:
            return [ast.Pass()]
        plain = ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node)
        return self.visit_Assign(plain)

    def visit_AugAssign(self, node: ast.AugAssign) -> list[ast.stmt]:
        before = ast.Expr(_hook("grows", self.visit(_loaded(node.target))))
        node.value = self.visit(node.value)
        return [*self._stores([node.target]), before, node]

    def _stores(self, targets: Sequence[ast.expr]) -> list[ast.stmt]:
        """Before an assignment to ``a[b]`` or ``a.b``: may a be changed?"""
        found: list[ast.stmt] = []
        for target in targets:
            for node in ast.walk(target):
                if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
                    if any(isinstance(n, (ast.Call, ast.Await, ast.NamedExpr)) for n in ast.walk(node)):
                        return [ast.Expr(_hook("stop", ast.Constant("assigns to a part of a call's result")))]
                    found.append(ast.Expr(_hook("changes", self.visit(_loaded(node.value)))))
        return found

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        return [*(ast.Expr(_hook("imports", ast.Constant(each.name))) for each in node.names), node]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt]:
        module = "." * node.level + (node.module or "")
        return [ast.Expr(_hook("imports", ast.Constant(module))), node]

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt:
        if node.decorator_list:
            return ast.Expr(_hook("stop", ast.Constant(f"decorates {node.name}()")))
        return self.function(_plain_def(node))

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Delete(self, node: ast.Delete) -> ast.stmt:
        if all(isinstance(target, ast.Name) for target in node.targets):
            return node
        return ast.Expr(_hook("stop", ast.Constant("deletes a part of an object")))

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        node.value = self.visit(node.value)
        return node


def _refusal(what: str) -> Any:
    def visit(_self: _Rewriter, _node: ast.stmt) -> ast.stmt:
        return ast.Expr(_hook("stop", ast.Constant(what)))

    return visit


for _kind, _what in {
    "Try": "catches errors, and only a run has them",
    "TryStar": "catches errors, and only a run has them",
    "Raise": "raises an error",
    "Global": "changes a global variable",
    "Nonlocal": "changes a variable of an enclosing function",
    "ClassDef": "defines a class",
    "AsyncFor": "iterates asynchronously",
}.items():
    setattr(_Rewriter, f"visit_{_kind}", _refusal(_what))
