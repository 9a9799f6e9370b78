"""Builds an HTML page that is complete in itself: no script, nothing to fetch. It is light or dark as the system is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from dtf.runs.charts import PALETTE, PARTS

_DARK = ("#74a7ff", "#ff9d66", "#63c97a", "#d79bea", "#ff85aa", "#4fc3d9", "#e0b64a", "#b3a1ff")
_DARK_PARTS = {
    "data": "#4fc3d9",
    "forward": "#74a7ff",
    "backward": "#b3a1ff",
    "communication": "#ff9d66",
    "optimizer": "#63c97a",
    "other": "#5b6571",
}


def _variables(
    ink: str, muted: str, line: str, pale: str, background: str, card: str, runs: Sequence[str], parts: dict[str, str]
) -> str:
    values = {"ink": ink, "muted": muted, "line": line, "pale": pale, "ground": background, "card": card}
    values |= {f"run{number}": colour for number, colour in enumerate(runs)} | {
        f"part-{name}": colour for name, colour in parts.items()
    }
    return "".join(f"--{name}:{colour};" for name, colour in values.items())


STYLE = (
    ":root{color-scheme:light dark;"
    + _variables("#1f2328", "#57606a", "#d8dee4", "#a5aeb8", "#f6f8fa", "#ffffff", PALETTE, PARTS)
    + "}@media(prefers-color-scheme:dark){:root{"
    + _variables("#e6edf3", "#9da7b3", "#30363d", "#6e7883", "#0d1117", "#161b22", _DARK, _DARK_PARTS)
    + """}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',sans-serif}
main{max-width:1200px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:26px;margin:0}h2{font-size:18px;margin:36px 0 12px}
p{margin:4px 0 0;color:var(--muted)}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px;overflow-x:auto}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(430px,1fr));gap:16px}
@media(max-width:520px){.grid{grid-template-columns:1fr}}
figure{margin:0}figcaption{color:var(--muted);font-size:13px;margin-top:4px}
svg{display:block;width:100%;height:auto;font-family:inherit}
.wide svg{min-width:860px}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th{text-align:left;font-weight:600;color:var(--muted);font-size:13px}
th,td{padding:6px 12px 6px 0;border-bottom:1px solid var(--line);vertical-align:top;white-space:nowrap}
tr:last-child td{border-bottom:0}
td.number,th.number{text-align:right}td:last-child,th:last-child{padding-right:0}
.chip{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:8px;vertical-align:-1px}
code{font:13px ui-monospace,'SF Mono',Menlo,Consolas,monospace}
.stack{display:flex;height:18px;border-radius:4px;overflow:hidden;min-width:180px}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;color:var(--muted);font-size:13px;margin:0 0 10px}
"""
)


def page(title: str, about: str, sections: Iterable[tuple[str, str]]) -> str:
    """The whole page. `sections`: heading and HTML of each. `title` and `about` are plain text."""
    body = "\n".join(f"<section>\n<h2>{escape(heading)}</h2>\n{content}\n</section>" for heading, content in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" '
        'content="width=device-width,initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n<header><h1>{escape(title)}</h1>\n<p>{escape(about)}</p></header>\n"
        f"{body}\n</main>\n</body>\n</html>\n"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: int | None = None) -> str:
    """A table. The cells of `rows` are HTML. Columns from number `numbers` on are aligned to the right."""

    def cell(tag: str, column: int, text: str) -> str:
        side = ' class="number"' if numbers is not None and column >= numbers else ""
        return f"<{tag}{side}>{text}</{tag}>"

    head = "".join(cell("th", column, escape(text)) for column, text in enumerate(heads))
    lines = ("<tr>" + "".join(cell("td", column, text) for column, text in enumerate(row)) + "</tr>" for row in rows)
    return (
        f'<div class="card"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody></table></div>"
    )


def chip(run: int) -> str:
    """A small square in the colour of a run."""
    return f'<span class="chip" style="background:var(--run{run % len(PALETTE)})"></span>'


def figure(svg: str, caption: str, wide: bool = False) -> str:
    label = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure class="card{" wide" if wide else ""}">{svg}{label}</figure>'


def grid(figures: Iterable[str]) -> str:
    return '<div class="grid">\n' + "\n".join(figures) + "\n</div>"


def stack(parts: dict[str, float]) -> str:
    """Shares that add up to 1, as one bar."""
    pieces = (
        f'<span style="width:{100 * share:.2f}%;background:var(--part-{name})" title="{escape(name)} '
        f'{100 * share:.1f} %"></span>'
        for name, share in parts.items()
    )
    return f'<div class="stack">{"".join(pieces)}</div>'


def legend(meanings: Iterable[tuple[str, str]]) -> str:
    """The meanings of colours: (CSS variable, text) of each; text without a colour where the variable is empty."""
    marks = (
        "<span>"
        + (f'<span class="chip" style="background:var(--{variable})"></span>' if variable else "")
        + f"{escape(text)}</span>"
        for variable, text in meanings
    )
    return f'<div class="key">{"".join(marks)}</div>'


def matrix(rows: Sequence[tuple[str, Sequence[int]]], heads: Sequence[str]) -> str:
    """Counts as a table whose cells are the darker the larger their share of a row. `heads`: of columns."""

    def cell(count: int, total: int) -> str:
        strength = round(70 * count / total) if total else 0
        colour = f"background:color-mix(in srgb,var(--run0) {strength}%,transparent)"
        return f'<td class="number" style="{colour}">{f"{count:,}" if count else ""}</td>'

    head = "<th></th>" + "".join(f'<th class="number">{escape(text)}</th>' for text in heads)
    lines = (
        f"<tr><th>{escape(name)}</th>" + "".join(cell(count, sum(counts)) for count in counts) + "</tr>"
        for name, counts in rows
    )
    body = "\n".join(lines)
    return f'<div class="card"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
