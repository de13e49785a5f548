"""Small changes of a function, each one a rule forgotten or turned round.

A mutant is named by its module and its number there, in the order of the source; the same source gives the same mutants.
What a function says (messages, descriptions, annotations) and what it checks of itself (`assert`) is left alone.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

_COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_CALLED = {"max": "min", "min": "max", "any": "all", "all": "any"}
_DROPPED = (ast.Expr, ast.AugAssign, ast.Continue, ast.Break, ast.Raise, ast.Delete)
"""Statements without which a function still runs. An expression that is a statement is an order: an effect, or a call."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """`function`: its qualified name in the module. `what`: the change, as `line: before -> after`."""

    module: str
    number: int
    function: str
    what: str

    @property
    def line(self) -> int:
        return int(self.what.partition(":")[0])


def _set(node: Any, name: str, new: Any) -> Callable[[], Callable[[], None]]:
    old = getattr(node, name)

    def make() -> Callable[[], None]:
        setattr(node, name, new)
        return lambda: setattr(node, name, old)

    return make


def _put(nodes: list[Any], at: int, *new: Any) -> Callable[[], Callable[[], None]]:
    """`new` in the place of one of a list."""
    old = list(nodes)

    def make() -> Callable[[], None]:
        nodes[at : at + 1] = new

        def take_back() -> None:
            nodes[:] = old

        return take_back

    return make


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All below, in the order of the source, but for what is only said. A function within belongs to the outer one."""
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "type_comment"} or (
            isinstance(node, ast.Raise) and name == "exc"
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Assert):
                continue
            yield child
            yield from _nodes(child)


Made = Iterator[tuple[str, Callable[[], Callable[[], None]]]]
"""What changes, and what makes it so, which answers with what takes it back."""


def _compared(node: ast.Compare) -> Made:
    if len(node.ops) == 1:
        for other in _COMPARED[type(node.ops[0])]:
            yield f"{other.__name__} for {type(node.ops[0]).__name__}", _put(node.ops, 0, other())


def _joined(node: ast.BoolOp) -> Made:
    neutral = isinstance(node.op, ast.And)
    for at, part in enumerate(node.values):
        yield f"without {ast.unparse(part)}", _put(node.values, at, ast.Constant(neutral))


def _negated(node: ast.UnaryOp) -> Made:
    if isinstance(node.op, ast.Not):
        yield "without not", _set(node, "operand", ast.UnaryOp(ast.Not(), node.operand))


def _decided(node: ast.If | ast.IfExp) -> Made:
    yield "always", _set(node, "test", ast.Constant(True))
    yield "never", _set(node, "test", ast.Constant(False))


def _filtered(node: ast.comprehension) -> Made:
    for at, part in enumerate(node.ifs):
        yield f"without if {ast.unparse(part)}", _put(node.ifs, at)


def _summed(node: ast.BinOp) -> Made:
    if isinstance(node.op, ast.Add) and not _is_text(node):
        yield "Sub for Add", _set(node, "op", ast.Sub())
    elif isinstance(node.op, ast.Sub):
        yield "Add for Sub", _set(node, "op", ast.Add())


def _called(node: ast.Call) -> Made:
    if isinstance(node.func, ast.Name) and node.func.id in _CALLED:
        other = _CALLED[node.func.id]
        yield f"{other} for {node.func.id}", _set(node.func, "id", other)
    elif isinstance(node.func, ast.Name) and node.func.id == "replace":
        for at, keyword in enumerate(node.keywords):
            yield f"without {ast.unparse(keyword)}", _put(node.keywords, at)


def _guarded(node: ast.match_case) -> Made:
    if node.guard is not None:
        yield f"without if {ast.unparse(node.guard)}", _set(node, "guard", None)


_OF: dict[type[ast.AST], Callable[[Any], Made]] = {
    ast.Compare: _compared,
    ast.BoolOp: _joined,
    ast.UnaryOp: _negated,
    ast.If: _decided,
    ast.IfExp: _decided,
    ast.comprehension: _filtered,
    ast.BinOp: _summed,
    ast.Call: _called,
    ast.match_case: _guarded,
}


def _changes(node: ast.AST) -> Made:
    if type(node) in _OF:
        yield from _OF[type(node)](node)
    for name in ("body", "orelse", "finalbody"):
        statements = getattr(node, name, None)
        for at, statement in enumerate(statements if isinstance(statements, list) else []):
            if _is_dropped(statement):
                yield f"dropped: {ast.unparse(statement)}", _put(statements, at, ast.Pass())


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(side, ast.Tuple | ast.JoinedStr | ast.List) for side in (node.left, node.right))


def _is_dropped(statement: ast.stmt) -> bool:
    """Also what is written down elsewhere than in a name of the function's own, and an end before the end."""
    match statement:
        case ast.Return(value=None) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
    return isinstance(statement, _DROPPED) and not _is_docstring(statement)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Of the module, and of its classes, by qualified name."""
    pending: list[tuple[str, ast.AST]] = [("", tree)]
    while pending:
        prefix, node = pending.pop(0)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                pending.append((f"{prefix}{child.name}.", child))
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name, child


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def _all(module: str) -> Iterator[tuple[Mutant, Callable[[], Callable[[], None]]]]:
    number = 0
    for function, tree in _functions(_tree(module)):
        for node in [tree, *_nodes(tree)]:
            for what, make in _changes(node):
                line = getattr(node, "lineno", None) or getattr(getattr(node, "target", None), "lineno", tree.lineno)
                yield Mutant(module, number, function, f"{line}: {what}"), make
                number += 1


def mutants(module: str) -> list[Mutant]:
    """All of a module."""
    return [mutant for mutant, _ in _all(module)]


def changed_lines(module: str, revision: str) -> set[int]:
    """Those of a module that weren't so at a revision of the repository: all, where it had no such file."""
    path = inspect.getsourcefile(importlib.import_module(module))
    assert path is not None
    command = ("git", "diff", "--unified=0", revision, "--", path)
    changes = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: set[int] = set()
    for first, count in re.findall(r"^@@ \S+ \+(\d+)(?:,(\d+))? @@", changes, re.MULTILINE):
        found.update(range(int(first), int(first) + int(count or 1)))
    return found


def _live(mutant: Mutant) -> FunctionType:
    found: Any = importlib.import_module(mutant.module)
    for name in mutant.function.split("."):
        found = inspect.getattr_static(found, name)
    for wrapper in ("fget", "__func__", "func", "__wrapped__"):
        found = getattr(found, wrapper, found)
    assert isinstance(found, FunctionType), mutant
    return found


def _code(code: CodeType, name: str) -> CodeType | None:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found = constant if constant.co_qualname == name else _code(constant, name)
            if found is not None:
                return found
    return None


def apply(mutant: Mutant) -> None:
    """Make the change in this process, for good, wherever the function is known.

    Raises:
        ValueError: it can't be made so.
    """
    function = _live(mutant)
    take_back = next(make for one, make in _all(mutant.module) if one == mutant)()
    try:
        tree = ast.fix_missing_locations(_tree(mutant.module))
        code = _code(compile(tree, function.__code__.co_filename, "exec", dont_inherit=True), mutant.function)
    finally:
        take_back()
    if code is None or code.co_freevars != function.__code__.co_freevars:
        raise ValueError(mutant)
    function.__code__ = code
