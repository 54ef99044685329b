"""What a reader of this code base feels, in figures, beside those of projects that are read with pleasure.

`make house` prints it. It is read before a large change and after it; nothing of it is enforced, since a figure that is
enforced is worked around: a limit on the length of files gave many files just below it, in fragments that one other
module imports.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

SOURCE = Path(__file__).parents[1] / "src" / "shoal"
MANY_PARAMETERS = 12
LONG_FUNCTION = 50
MACHINES = "swarm"

OTHERS = {
    "h11": ("153/369/659", "14", "26.2", "21", "0/0", "2", "2", "14"),
    "httpx": ("248/641/2019", "17", "3.9", "25", "2/0", "10", "14", "19"),
    "torchft": ("112/796/2023", "19", "5.9", "47", "2/0", "5", "6", "6"),
    "nano-vllm": ("62/216/257", "0", "0.1", "9", "0/0", "12", "8", "17"),
}
"""Their figures in the order of `FEATURES`, measured 2026 in the same way, without their tests."""

FEATURES = (
    "lines of a file: median/p90/max",
    "docstrings, % of lines",
    "comments of their own line, % of lines",
    f"functions over {LONG_FUNCTION} lines, of 1,000",
    f"constructors/dataclasses over {MANY_PARAMETERS}",
    "comprehensions, per 1,000 lines of code",
    "if-expressions, per 1,000 lines of code",
    "boolean operators, per 1,000 lines of code",
)


@dataclass(frozen=True)
class Module:
    """What is counted in one file.

    Attributes:
        name: dotted, below the package that is looked at: `swarm.routing`.
        lines: all of them.
        code: those that are neither empty nor only a comment or a docstring.
        docstrings: lines of docstrings.
        comments: lines that hold only a comment.
        functions: how many lines each function has.
        constructors: how many parameters each constructor takes, by the name of its class.
        fields: how many fields each dataclass has, by its name.
        callbacks: parameters of constructors, and fields, that are called.
        comprehensions: lists, sets, dicts and generators.
        choices: `a if b else c`.
        operators: chains of `and` or of `or`.
        imports: dotted names of all modules of this project that it imports, or might.
    """

    name: str
    lines: int
    code: int
    docstrings: int
    comments: int
    functions: tuple[int, ...]
    constructors: dict[str, int]
    fields: dict[str, int]
    callbacks: int
    comprehensions: int
    choices: int
    operators: int
    imports: frozenset[str]

    @property
    def package(self) -> str:
        """The name of the package that it is in, or its own for a module outside of all."""
        return self.name.partition(".")[0]


def measured(name: str, text: str, project: str = "shoal") -> Module:
    """Count what one file has."""
    tree = ast.parse(text)
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    documented = _docstring_lines(tree)
    comments = {token.start[0] for token in tokens if token.type == tokenize.COMMENT and not _before(token)}
    empty = {number for number, line in enumerate(text.splitlines(), 1) if not line.strip()}
    nodes = list(ast.walk(tree))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    constructors = {node.name: list(_parameters(node)) for node in classes}
    fields = {node.name: list(_fields(node)) for node in classes if _is_dataclass(node)}
    taken = [each for annotations in (*constructors.values(), *fields.values()) for each in annotations]
    num_lines = len(text.splitlines())
    return Module(
        name=name,
        lines=num_lines,
        code=num_lines - len(documented | comments | empty),
        docstrings=len(documented),
        comments=len(comments),
        functions=tuple(
            (node.end_lineno or node.lineno) - node.lineno + 1
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ),
        constructors={name: len(annotations) for name, annotations in constructors.items()},
        fields={name: len(annotations) for name, annotations in fields.items()},
        callbacks=sum("Callable" in annotation for annotation in taken),
        comprehensions=sum(
            isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) for node in nodes
        ),
        choices=sum(isinstance(node, ast.IfExp) for node in nodes),
        operators=sum(isinstance(node, ast.BoolOp) for node in nodes),
        imports=frozenset(_imports(tree, project)),
    )


def _before(token: tokenize.TokenInfo) -> str:
    return token.line[: token.start[1]].strip()


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Return the lines of all texts that stand alone as a statement: docstrings, also those of attributes."""
    found: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                found |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            case _:
                pass
    return found


def _parameters(node: ast.ClassDef) -> Iterator[str]:
    """Yield the annotations of what a class's constructor takes."""
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            arguments = [*member.args.posonlyargs, *member.args.args, *member.args.kwonlyargs]
            yield from (ast.unparse(each.annotation) if each.annotation else "" for each in arguments[1:])


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Yield the annotations of a dataclass's fields."""
    for member in node.body:
        if isinstance(member, ast.AnnAssign) and "ClassVar" not in ast.unparse(member.annotation):
            yield ast.unparse(member.annotation)


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _imports(tree: ast.Module, project: str) -> Iterator[str]:
    """Yield the modules, below the project, that are imported; of `from a import b`, both a and a.b may be one."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (name.removeprefix(f"{project}.") for name in names if name.startswith(f"{project}."))


def fragments(modules: Sequence[Module]) -> list[tuple[str, str]]:
    """Return each module that one module alone imports, which is in the same package, and that one."""
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for module in modules:
        for name in module.imports:
            importers[name].add(module.name)
    found: list[tuple[str, str]] = []
    for module in modules:
        if "." in module.name and len(importers[module.name]) == 1:
            [importer] = importers[module.name]
            if importer.rpartition(".")[0] == module.name.rpartition(".")[0]:
                found.append((module.name, importer))
    return found


def features(modules: Sequence[Module]) -> tuple[str, ...]:
    """Return the figures in the order of `FEATURES`."""
    lengths = sorted(module.lines for module in modules)
    p90 = quantiles(lengths, n=10)[-1] if len(lengths) > 1 else lengths[0]
    lines = sum(lengths)
    functions = [size for module in modules for size in module.functions]
    long = sum(size > LONG_FUNCTION for size in functions) * 1000 / max(1, len(functions))
    constructors = sum(count > MANY_PARAMETERS for module in modules for count in module.constructors.values())
    dataclasses = sum(count > MANY_PARAMETERS for module in modules for count in module.fields.values())
    return (
        f"{median(lengths):.0f}/{p90:.0f}/{lengths[-1]}",
        f"{sum(module.docstrings for module in modules) * 100 / lines:.0f}",
        f"{sum(module.comments for module in modules) * 100 / lines:.1f}",
        f"{long:.0f}",
        f"{constructors}/{dataclasses}",
        *(f"{each:.0f}" for each in _densities(modules)),
    )


def _densities(modules: Sequence[Module]) -> tuple[float, float, float]:
    """Return comprehensions, if-expressions and boolean operators in a thousand lines of code."""
    code = max(1, sum(module.code for module in modules))
    comprehensions = sum(module.comprehensions for module in modules)
    choices = sum(module.choices for module in modules)
    operators = sum(module.operators for module in modules)
    return comprehensions * 1000 / code, choices * 1000 / code, operators * 1000 / code


def read(source: Path) -> list[Module]:
    """Measure every module below a folder, but those that are empty."""
    found: list[Module] = []
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text()
        if text.strip():
            found.append(measured(name or source.name, text, source.name))
    return found


def report(modules: Sequence[Module]) -> str:
    """Say it all."""
    machines = [module for module in modules if module.package == MACHINES]
    columns = {"all": features(modules), MACHINES: features(machines), **OTHERS}
    lines = [" " * 44 + "".join(f"{name:>15}" for name in columns)]
    for index, feature in enumerate(FEATURES):
        lines.append(f"{feature:44}" + "".join(f"{figures[index]:>15}" for figures in columns.values()))
    lines += ["", f"{'package':14}{'files':>7}{'lines':>8}{'code':>8}{'comments':>10}{'callbacks':>11}" + _DENSE]
    packages = sorted({module.package for module in modules})
    for package in packages:
        inside = [module for module in modules if module.package == package]
        size, code = sum(each.lines for each in inside), sum(each.code for each in inside)
        comments = sum(each.comments for each in inside) * 100 / size
        callbacks = sum(each.callbacks for each in inside)
        dense = "".join(f"{each:>16.0f}" for each in _densities(inside))
        lines.append(f"{package:14}{len(inside):>7}{size:>8}{code:>8}{comments:>9.1f}%{callbacks:>11}{dense}")
    lines += ["", f"constructors of more than {MANY_PARAMETERS} parameters:"]
    for module in modules:
        large = {name: count for name, count in module.constructors.items() if count > MANY_PARAMETERS}
        lines += [f"  {count:3}  {module.name}.{name}" for name, count in large.items()]
    alone = fragments(modules)
    lines += ["", f"{len(alone)} modules that one sibling alone imports:"]
    sizes = {module.name: module.lines for module in modules}
    lines += [f"  {sizes[name]:3}  {name} <- {importer}" for name, importer in sorted(alone)]
    return "\n".join(lines)


_DENSE = "".join(f"{name:>16}" for name in ("comprehensions", "if-expressions", "and/or"))


if __name__ == "__main__":
    print(report(read(SOURCE)))
