"""Draw the floors of the package from its imports, into docs/floors.svg: parts above what they use.

`--check` changes nothing, and fails if the picture is not what the imports say.
"""

import argparse
import ast
import graphlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "floors.svg"
# What everything may import, or what imports everything: arrows to and from them say nothing.
LEFT_OUT = {"", "testing", "integrations", "autocast", "errors", "files", "rng", "threads", "util"}
LEFT_OUT |= {"program", "stacked_training"}
WIDTH, BOX, HEIGHT, GAP = 760, 118, 34, 46


@dataclass(frozen=True)
class Import:
    """One imported module, as an absolute dotted name."""

    source: str
    target: str
    line: int
    in_function: bool

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def read_imports(package: Path) -> dict[str, list[Import]]:
    """Return the imports of every module below a package's directory, by module."""
    paths = {_module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    return {name: list(_imports_of(name, path, set(paths))) for name, path in paths.items()}


def package_of(module: str) -> str:
    """Return which part of the package a module belongs to: `""` for its own __init__."""
    return module.split(".")[1] if "." in module else ""


def _module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports_of(module: str, path: Path, modules: set[str]) -> Iterator[Import]:
    # `from . import x` counts from the package: the module itself where it is an __init__.
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node, in_function in _walk(ast.parse(path.read_text(), str(path))):
        for target in _targets(node, package, modules):
            yield Import(module, target, node.lineno, in_function)


def _walk(node: ast.AST, in_function: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield import statements, and whether a function holds them."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node, in_function
    in_function = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, in_function)


def _targets(node: ast.stmt, package: str, modules: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level]
            base = ".".join([*parents, base]).rstrip(".")
        # `from package import name` is an import of the submodule where there is one.
        for alias in node.names:
            name = f"{base}.{alias.name}"
            yield name if name in modules else base


def floors() -> tuple[list[list[str]], set[tuple[str, str]]]:
    """Return the parts by floor, the ground first, and the arrows that no others imply."""
    imports = [item for items in read_imports(ROOT / "tyxe").values() for item in items]
    pairs = {
        (package_of(item.source), package_of(item.target))
        for item in imports
        if item.target.split(".")[0] == "tyxe"
    }
    below: dict[str, set[str]] = {}
    for source, target in pairs:
        if not {source, target} & LEFT_OUT:
            below.setdefault(source, set()).update({target} - {source})
            below.setdefault(target, set())
    height: dict[str, int] = {}
    reached: dict[str, set[str]] = {}
    for part in graphlib.TopologicalSorter(below).static_order():
        height[part] = 1 + max((height[other] for other in below[part]), default=-1)
        reached[part] = below[part].union(*(reached[other] for other in below[part]))
    found = [sorted(p for p in height if height[p] == h) for h in range(max(height.values()) + 1)]
    arrows = {
        (part, other)
        for part in below
        for other in below[part]
        if not any(other in reached[between] for between in below[part])
    }
    return found, arrows


def laid_out(rows: list[list[str]], arrows: set[tuple[str, str]]) -> dict[str, tuple[int, int]]:
    """Return the top middle of each box: the order in which no arrow runs through a box."""
    total = len(rows) * (HEIGHT + GAP) + GAP

    def places(orders: tuple[tuple[str, ...], ...], shift: int) -> dict[str, tuple[int, int]]:
        return {
            part: (
                WIDTH * (index + 1) // (len(row) + 1) + (shift if len(row) == 1 else 0),
                total - GAP - HEIGHT - level * (HEIGHT + GAP),
            )
            for level, row in enumerate(orders)
            for index, part in enumerate(row)
        }

    def hidden(found: dict[str, tuple[int, int]]) -> tuple[int, int]:
        crossed, length = 0, 0
        for source, target in arrows:
            (x, y), (u, v) = found[source], found[target]
            length += abs(x - u)
            for part, (left, top) in found.items():
                if part not in (source, target) and y < top < v:
                    at = x + (u - x) * (top + HEIGHT / 2 - y - HEIGHT) / (v - y - HEIGHT)
                    crossed += abs(at - left) < BOX / 2 + 8
        return crossed, length

    orders = itertools.product(*(itertools.permutations(row) for row in rows))
    shifts = (0, -130, 130)
    return min((places(*one) for one in itertools.product(orders, shifts)), key=hidden)


def picture() -> str:
    """Return the picture as SVG."""
    rows, arrows = floors()
    total = len(rows) * (HEIGHT + GAP) + GAP
    places = laid_out(rows, arrows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" '
        'font-family="sans-serif" font-size="14">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="#777"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{total}" fill="#fff"/>',
    ]
    for part, other in sorted(arrows):
        (x, y), (u, v) = places[part], places[other]
        lines.append(
            f'<line x1="{x}" y1="{y + HEIGHT}" x2="{u}" y2="{v - 2}" '
            'stroke="#777" marker-end="url(#tip)"/>'
        )
    for part, (x, y) in sorted(places.items()):
        lines.append(
            f'<rect x="{x - BOX // 2}" y="{y}" width="{BOX}" height="{HEIGHT}" rx="6" '
            'fill="#eef3fb" stroke="#345"/>'
        )
        lines.append(f'<text x="{x}" y="{y + HEIGHT // 2 + 5}" text-anchor="middle">{part}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if outdated")
    if parser.parse_args().check:
        if PICTURE.read_text() != picture():
            raise SystemExit("docs/floors.svg is not what the imports say: run docs/floors.py")
    else:
        PICTURE.write_text(picture())
