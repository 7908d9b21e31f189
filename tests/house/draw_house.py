"""`make house`: the rooms and who imports whom, drawn from the code into docs/house.svg."""

import ast
from collections import Counter
from html import escape
from pathlib import Path

import grimp
from test_house import FILES, PACKAGE, ROOMS, room

PICTURE = Path(__file__).parents[2] / "docs" / "house.svg"
CELL, LEFT, TOP = 28, 540, 96
DARK, GREY, LINE = "#0f172a", "#475569", "#e2e8f0"
FONT = 'font-family="Helvetica, Arial, sans-serif"'


def imports() -> Counter[tuple[str, str]]:
    """How many files of one room import a file of another."""
    graph = grimp.build_graph("rloo_cli", cache_dir=None)
    found: Counter[tuple[str, str]] = Counter()
    for module in graph.modules:
        for other in graph.find_modules_directly_imported_by(module):
            pair = _room(module), _room(other)
            if "" not in pair and pair[0] != pair[1]:
                found[pair] += 1
    return found


def _room(module: str) -> str:
    """`rloo_cli.data.batch` is in `data`, `rloo_cli.run` is `run.py`; "" for the package itself."""
    name = module.split(".")[1:2]
    file = f"{name[0]}.py" if name else ""
    return file if file in FILES else "".join(name)


def purpose(name: str) -> str:
    """The first sentence that the room says of itself, in a few words."""
    path = PACKAGE / name if name.endswith(".py") else PACKAGE / name / "__init__.py"
    said = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
    short = said.partition(". ")[0].rstrip(".")
    return short if len(short) < 60 else short[:57].rsplit(" ", 1)[0] + " ..."


def picture() -> str:
    """The whole SVG: a line for each room, and how many files of it import each room below it.

    An import that goes up would stand to the left of the diagonal.
    """
    names = [n for level in reversed(ROOMS) for n in level.split() if n != "__main__.py"]
    sizes = Counter(room(file) for file in FILES)
    counts = imports()
    lines = []
    for row, name in enumerate(names):
        y = TOP + row * CELL
        x = LEFT + row * CELL
        lines += [
            text(16, y + 18, name, "bold"),
            text(130, y + 18, str(sizes[name]), anchor="end", colour=GREY),
            text(146, y + 18, purpose(name), colour=GREY),
            f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="{DARK}"/>',
            f'<text transform="translate({x + 19} {TOP - 8}) rotate(-60)" {FONT} '
            f'font-size="12" fill="{DARK}">{escape(name)}</text>',
        ]
        for column, other in enumerate(names):
            if count := counts[name, other]:
                shade = min(0.9, 0.12 + count / 40)
                colour = "#2563eb" if column > row else "#dc2626"
                lines += [
                    f'<rect x="{LEFT + column * CELL}" y="{y}" width="{CELL}" height="{CELL}" '
                    f'fill="{colour}" fill-opacity="{shade:.2f}"/>',
                    text(LEFT + column * CELL + CELL / 2, y + 18, str(count), anchor="middle"),
                ]
    side = CELL * len(names)
    for n in range(len(names) + 1):
        lines += [
            f'<path d="M{LEFT} {TOP + n * CELL}h{side}" stroke="{LINE}"/>',
            f'<path d="M{LEFT + n * CELL} {TOP}v{side}" stroke="{LINE}"/>',
        ]
    width, height = LEFT + side + 60, TOP + side + 16
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">'
    )
    back = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([head, back, *lines, "</svg>\n"])


def text(
    x: float, y: float, said: str, weight: str = "normal", anchor: str = "start", colour: str = DARK
) -> str:
    """One line of text."""
    return (
        f'<text x="{x:g}" y="{y:g}" {FONT} font-size="12" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{colour}">{escape(said)}</text>'
    )


if __name__ == "__main__":
    PICTURE.write_text(picture())
    print(f"docs/{PICTURE.name}: {len(FILES)} files")
