"""What can be changed in a Python source: small wrong versions of one expression or statement each.

    for change in changes(source): ...      # every change that the operators know
    apply(source, change)                   # the source with it

A Change is text for text inside one function, so that it is found again after other lines moved:
`number` is its place among equal changes of that function. Words (docstrings, messages),
annotations, decorators and imports are left alone: they decide nothing.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from dataclasses import dataclass, replace

COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//",
    ast.Pow: "*", ast.BitAnd: "|", ast.BitOr: "&",
}  # fmt: skip
OTHER_CALL = {
    "max": "min", "min": "max", "any": "all", "all": "any", "cumsum": "asarray",
    "maximum": "minimum", "minimum": "maximum",
}  # fmt: skip
SYMMETRIC = ("max", "min", "maximum", "minimum", "merge", "equal", "same_bits")
DROPPED_METHODS = ("abs", "flip", "clone", "sort", "reshape", "square", "sqrt")
CRASHES = ("arguments swapped", "returns nothing")  # mostly, so any test kills them: drawn last
TOLERANCE_FACTORS = (4, 10, 1000, 4000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One wrong version. start, end: offsets in bytes; function: qualified, "" for the module."""

    function: str
    operator: str
    before: str
    after: str
    start: int
    end: int
    number: int = 0

    @property
    def key(self) -> str:
        """The same for the same change, wherever its lines are now."""
        text = "\0".join((self.function, self.operator, self.before, self.after, str(self.number)))
        return hashlib.sha256(text.encode()).hexdigest()[:10]


def changes(source: str) -> list[Change]:
    """Every change that the operators know, numbered within its function."""
    found = _Finder(source)
    found.visit(ast.parse(source))
    seen: Counter[tuple[str, ...]] = Counter()
    out = []
    for change in sorted(found.changes, key=lambda c: (c.start, c.end)):
        what = (change.function, change.operator, change.before, change.after)
        out.append(replace(change, number=seen[what]))
        seen[what] += 1
    return out


def apply(source: str, change: Change) -> str:
    """The source with one change, which must still be Python."""
    data = source.encode()
    changed = (data[: change.start] + change.after.encode() + data[change.end :]).decode()
    ast.parse(changed)
    return changed


def function_source(source: str, function: str) -> tuple[int, int]:
    """Where a function begins and ends, in bytes; the whole module for ""."""
    if not function:
        return 0, len(source.encode())
    nodes: list[ast.stmt] = ast.parse(source).body
    node: ast.AST | None = None
    for name in function.split("."):
        named = [n for n in nodes if getattr(n, "name", None) == name]
        if not named:
            raise LookupError(f"no function {function}")
        node = named[-1]
        nodes = getattr(node, "body", [])
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    lines = _line_starts(source)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return lines[node.lineno - 1], lines[node.end_lineno - 1] + node.end_col_offset


def _line_starts(source: str) -> list[int]:
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


class _Finder(ast.NodeVisitor):
    """Walks a module and collects changes, with the function that each is in."""

    def __init__(self, source: str) -> None:
        self.data, self.starts = source.encode(), _line_starts(source)
        self.changes: list[Change] = []
        self.scope: list[str] = []
        self.jit = False

    # ---- where we are ----------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self.jit = self.jit, "triton" in ast.unparse(node.decorator_list or [ast.Pass()])
        self.scope.append(node.name)
        for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d)):
            self.visit(default)
        self._body(node.body)
        self.scope.pop()
        self.jit = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scope.append(node.name)
        self._body(node.body)
        self.scope.pop()

    def visit_Module(self, node: ast.Module) -> None:
        self._body(node.body)

    def _body(self, body: list[ast.stmt]) -> None:
        for statement in body:
            words = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not words and not isinstance(statement, ast.Import | ast.ImportFrom):
                self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Words."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """The condition before it is changed, its words are not."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Ours, and no answer depends on it."""

    # ---- what is changed -------------------------------------------------------------------------

    def _add(self, operator: str, node: ast.AST, after: str) -> None:
        start, end = self._span(node)
        before = self.data[start:end].decode()
        if before != after:
            self.changes.append(
                Change(
                    function=".".join(self.scope),
                    operator=operator,
                    before=before,
                    after=after,
                    start=start,
                    end=end,
                )
            )

    def _span(self, node: ast.AST) -> tuple[int, int]:
        start = self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        text = self.data[start:end].decode()
        return f"({text})" if isinstance(node, ast.NamedExpr) else text

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for i, op in enumerate(node.ops):
            signs = [_sign(o) for o in node.ops]
            signs[i] = COMPARISONS[type(op)]
            text = self._text(operands[0])
            for sign, operand in zip(signs, operands[1:], strict=True):
                text += f" {sign} {self._text(operand)}"
            self._add("comparison", node, text)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " or " if isinstance(node.op, ast.And) else " and "
        self._add("and/or", node, "(" + word.join(f"({self._text(v)})" for v in node.values) + ")")
        for i in range(len(node.values)):
            rest = [v for j, v in enumerate(node.values) if j != i]
            other = " and " if isinstance(node.op, ast.And) else " or "
            text = other.join(f"({self._text(v)})" for v in rest)
            self._add("condition dropped", node, f"({text})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            self._add("not/minus dropped", node, f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self._add("condition negated", node.test, f"not ({self._text(node.test)})")
        self.visit(node.test)
        self._body(node.body)
        self._body(node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._add("branch taken", node, f"({self._text(node.body)})")
        self._add("branch taken", node, f"({self._text(node.orelse)})")
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        if not self.jit:
            every = self._text(node.iter)
            self._add("first element skipped", node.iter, f"list({every})[1:]")
            self._add("last element skipped", node.iter, f"list({every})[:-1]")
        self.visit(node.iter)
        self._body(node.body)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._add("filter dropped", test, "True")
        if not self.jit:
            self._add("last element skipped", node.iter, f"list({self._text(node.iter)})[:-1]")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add("constant", node, str(not value))
        elif isinstance(value, int):
            self._add("constant", node, f"{value + 1}")
        elif isinstance(value, float):
            factors = TOLERANCE_FACTORS if not self.scope else (10,)
            for factor in factors:
                after = repr(value * factor) if value else "1.0"
                self._add(f"constant x{factor}" if value else "constant", node, after)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        sign = ARITHMETIC.get(type(node.op))
        if sign is not None:
            left, right = self._text(node.left), self._text(node.right)
            self._add("arithmetic", node, f"(({left}) {sign} ({right}))")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.slice, ast.Slice):
            low, high = node.slice.lower, node.slice.upper
            whole = self._text(node.value)
            if low is not None:
                self._add("slice", node, f"{whole}[:{self._text(high) if high else ''}]")
            if high is not None:
                self._add("slice", node, f"{whole}[{self._text(low) if low else ''}:]")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func
        if isinstance(name, ast.Name | ast.Attribute):
            last = name.id if isinstance(name, ast.Name) else name.attr
            if last in OTHER_CALL and not (isinstance(name, ast.Attribute) and self.jit and
                                           last in ("max", "min")):  # fmt: skip
                head = self._text(name)[: -len(last)]
                self._add("other call", name, head + OTHER_CALL[last])
            if isinstance(name, ast.Attribute) and last in DROPPED_METHODS:
                self._add("call dropped", node, self._text(name.value))
            if last in SYMMETRIC:
                return self.generic_visit(node)
        plain = [a for a in node.args if not isinstance(a, ast.Starred)]
        if len(node.args) == len(plain) >= 2 and self._text(plain[0]) != self._text(plain[1]):
            start, end = self._span(node)
            (a, b), (c, d) = self._span(plain[0]), self._span(plain[1])
            raw = self.data
            swapped = raw[start:a] + raw[c:d] + raw[b:c] + raw[a:b] + raw[d:end]
            self._add("arguments swapped", node, swapped.decode())
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self._add("returns nothing", node, "return None")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        self._add("statement deleted", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("statement deleted", node, "pass")
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add("continue", node, "pass")
        self._add("continue", node, "break")

    def visit_Break(self, node: ast.Break) -> None:
        self._add("break", node, "pass")


def _sign(op: ast.cmpop) -> str:
    return ast.unparse(ast.Compare(ast.Name("a"), [op], [ast.Name("b")]))[2:-2]
