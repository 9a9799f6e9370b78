"""The rooms of dtf: its packages, which of them import which, and what breaks the rules.

    python docs/rooms.py                                # rooms and arrows, the lowest room first
    python docs/rooms.py --check                        # the same rules, one line for each thing that breaks them
    python docs/rooms.py --svg docs/images/rooms.svg    # the picture in docs/architecture.md

A room may import itself and the rooms before it in ROOMS. Imports in functions and for types count. Modules may not
import each other in a circle. Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = (
    "core", "host", "distributed", "api", "checkpoint", "model", "data", "sparse", "optim", "config", "adapters",
    "strategies", "pserver", "observers", "runs", "launch", "cluster", "engine", "recipes", "jobs", "cli",
)  # fmt: skip
"""The lowest first. What lies in dtf/ itself stands above them all."""

MOST_ENTRIES, MOST_LINES, MOST_FUNCTION_LINES = 24, 400, 60

Imports = Mapping[str, set[str]]
"""Module -> the modules of dtf that it imports."""


def source_files(root: Path = ROOT) -> dict[str, Path]:
    """Module name -> file, of all that is shipped. `dtf/recipes` is a link to `recipes`."""
    files = {}
    for folder, prefix in ((root / "dtf", ()), (root / "recipes", ("dtf",))):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if parts[:2] != ("dtf", "recipes"):
                files[".".join((*prefix, *parts)).removesuffix(".__init__")] = path
    return files


@cache
def tree(path: Path) -> ast.Module:
    """A file that is shipped, parsed once."""
    return ast.parse(path.read_text(), str(path))


def imports_of(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """The arrows between modules, wherever in a file the import stands."""
    return {name: set(_imported(name, path, files)) - {name} for name, path in files.items()}


def _imported(name: str, path: Path, files: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            modules = [f"{source}.{alias.name}" for alias in node.names]
            targets = [module if module in files else source for module in modules]
        else:
            continue
        yield from (target for target in targets if target.split(".")[0] == "dtf")


def room_of(module: str) -> str:
    """The package a module lies in; `dtf` for what lies in none."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else "dtf"


def arrows(imports: Imports) -> Counter[tuple[str, str]]:
    """(room, room that it imports) -> how many pairs of modules."""
    pairs = ((room_of(module), room_of(target)) for module, targets in imports.items() for target in targets)
    return Counter((source, target) for source, target in pairs if source != target)


def upward(imports: Imports) -> list[str]:
    """Imports of a room that stands above, one line each."""
    height = {room: number for number, room in enumerate((*ROOMS, "dtf"))}
    return [
        f"{module} imports {target}: {room_of(target)} stands above {room_of(module)}"
        for module, targets in imports.items()
        for target in sorted(targets)
        if height[room_of(target)] > height[room_of(module)]
    ]


def circles(imports: Imports) -> list[str]:
    """Modules that import each other in a circle, one line each. A package may be imported by its own modules."""
    found: list[str] = []
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            found.append(f"circle: {' -> '.join([*trail[trail.index(module) :], module])}")
        elif module not in done:
            for target in sorted(imports.get(module, ())):
                if not module.startswith(f"{target}."):
                    visit(target, [*trail, module])
            done.add(module)

    for module in sorted(imports):
        visit(module, [])
    return found


def oversized(files: Mapping[str, Path], root: Path = ROOT) -> list[str]:
    """Long files, long functions and a crowded dtf/, one line each."""
    entries = [path.name for path in (root / "dtf").iterdir() if path.name != "__pycache__"]
    lines = [f"dtf/ has {len(entries)} entries; at most {MOST_ENTRIES}"] if len(entries) > MOST_ENTRIES else []
    more = [path for folder in ("tests", "bench", "docs") for path in sorted((root / folder).rglob("*.py"))]
    shipped = set(files.values())
    for path in [*files.values(), *more]:
        text, place = path.read_text(), path.relative_to(root)
        if (length := len(text.splitlines())) > MOST_LINES:
            lines.append(f"{place} has {length} lines; at most {MOST_LINES}")
        if length <= MOST_FUNCTION_LINES:
            continue
        for node in _functions(tree(path).body if path in shipped else ast.parse(text).body):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MOST_FUNCTION_LINES:
                lines.append(f"{place}:{node.lineno} {node.name} has {length} lines; at most {MOST_FUNCTION_LINES}")
    return lines


def _functions(body: Iterable[ast.AST]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All of these statements, and of those in them. An expression holds none, and is not looked into."""
    for node in body:
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node
            yield from _functions(ast.iter_child_nodes(node))


def unknown(files: Mapping[str, Path]) -> list[str]:
    """Modules that lie in no room, one line each."""
    return [
        f"{path.relative_to(ROOT)} lies in no room; see ROOMS in docs/rooms.py"
        for name, path in files.items()
        if room_of(name) == "dtf" and name not in ("dtf", "dtf.__main__")
    ]


def purpose(room: str, files: Mapping[str, Path]) -> str:
    """What lives there: the first sentence of its docstring."""
    text = ast.get_docstring(ast.parse(files[f"dtf.{room}"].read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].rstrip(".")


def listing(files: Mapping[str, Path], imports: Imports) -> str:
    """Rooms and arrows as text."""
    sizes, found = Counter(room_of(name) for name in files), arrows(imports)
    lines = []
    for room in ROOMS:
        targets = [f"{target} {found[room, target]}" for target in ROOMS if found[room, target]]
        lines += [
            f"{room:12} {sizes[room]:3} modules  {purpose(room, files)}",
            f"{'':24} imports {', '.join(targets) or 'nothing'}",
        ]
    pairs = sum(len(targets) for targets in imports.values())
    return "\n".join(
        [*lines, f"{len(ROOMS)} rooms, {len(files)} modules, {len(found)} arrows between rooms, {pairs} imports"]
    )


def svg(files: Mapping[str, Path], imports: Imports) -> str:
    """A picture: a row for each room, the highest first; a dot in a column says that the row imports the column's
    room. It has no numbers: it changes with the rooms and arrows alone.
    """
    found = arrows(imports)
    row, left, column = 26, 560, 24
    width, height = left + column * len(ROOMS) + 30, row * len(ROOMS) + 110
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<text x="14" y="22" font-size="14" font-weight="bold">The rooms of dtf: each imports only what stands below '
        "it</text>",
    ]
    for number, room in enumerate(ROOMS):
        x = left + column * number + column / 2
        parts.append(f'<text transform="translate({x + 4},96) rotate(-60)" fill="#555">{room}</text>')
    for number, room in enumerate(reversed(ROOMS)):
        y = 104 + row * number
        shade = "#f3f6fb" if number % 2 else "#e7eef8"
        parts.append(f'<rect x="10" y="{y}" width="{width - 20}" height="{row - 2}" fill="{shade}"/>')
        parts.append(f'<text x="16" y="{y + 16}" font-weight="bold">{room}</text>')
        text = purpose(room, files)
        text = text if len(text) < 72 else f"{text[:69].rsplit(' ', 1)[0]} ..."
        parts.append(f'<text x="128" y="{y + 16}" fill="#333" font-size="11">{escape(text)}</text>')
        for place, target in enumerate(ROOMS):
            x = left + column * place + column / 2
            if target == room:
                parts.append(f'<rect x="{x - 6}" y="{y + 6}" width="12" height="12" fill="#1f4e8c"/>')
            elif found[room, target]:
                title = f"<title>{room} imports {target}</title>"
                parts.append(f'<circle cx="{x}" cy="{y + 12}" r="5" fill="#5b8fd1">{title}</circle>')
    return "\n".join([*parts, "</svg>", ""])


def outdated(files: Mapping[str, Path], imports: Imports) -> list[str]:
    """Whether the picture in the documentation shows other rooms or arrows, as one line."""
    picture = "docs/images/rooms.svg"
    if (ROOT / picture).read_text() == svg(files, imports):
        return []
    return [f"{picture} shows other rooms or arrows; draw it again: python docs/rooms.py --svg {picture}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="print only what breaks the rules")
    parser.add_argument("--svg", metavar="FILE", help="draw the picture")
    given = parser.parse_args()
    files = source_files()
    imports = imports_of(files)
    if not given.check and not given.svg:
        print(listing(files, imports))
    if given.svg:
        Path(given.svg).write_text(svg(files, imports))
    problems = [*unknown(files), *upward(imports), *circles(imports), *oversized(files), *outdated(files, imports)]
    for problem in problems:
        print(problem, file=sys.stderr)
    if not given.svg:
        print(f"{len(upward(imports))} upward arrows, {len(circles(imports))} circles, {len(problems)} problems")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
