"""A report as blocks, written as Markdown or as one HTML page that needs nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Heading:
    """A heading of rank 1 (the page's) to 3."""

    text: str
    rank: int = 2


@dataclass(frozen=True)
class Paragraph:
    """Plain text."""

    text: str


@dataclass(frozen=True)
class Banner:
    """A verdict in large letters, with a sentence."""

    verdict: str
    text: str


@dataclass(frozen=True)
class Table:
    """Rows of plain text under a header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """An SVG picture and its caption; Markdown has the caption alone."""

    svg: str
    caption: str


@dataclass(frozen=True)
class Code:
    """Text that keeps its lines, folded under a title."""

    title: str
    text: str


Block = Heading | Paragraph | Banner | Table | Figure | Code

_VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE")

_STYLE = """
:root { color-scheme: light; --ink: #1c2330; --soft: #5b6475; --rule: #dfe3ea; --paper: #ffffff; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 20px 64px; max-width: 960px; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 26px; margin: 0 0 12px; } h2 { font-size: 20px; margin: 40px 0 8px; padding-top: 12px;
  border-top: 1px solid var(--rule); } h3 { font-size: 16px; margin: 20px 0 4px; }
p { margin: 6px 0; overflow-wrap: anywhere; }
.banner { display: flex; flex-wrap: wrap; align-items: center; gap: 8px 16px; padding: 14px 18px; border-radius: 8px; }
.banner b { font-size: 24px; } .banner.PASS { background: #e3f4e8; } .banner.FAIL { background: #fbe3e3; }
.banner.INCONCLUSIVE { background: #fdf1d7; }
td.PASS { color: #18713a; font-weight: 600; } td.FAIL { color: #b01818; font-weight: 600; }
td.INCONCLUSIVE { color: #8a5a00; font-weight: 600; }
.scroll { overflow-x: auto; margin: 10px 0; }
table { border-collapse: collapse; font-size: 14px; min-width: 60%; }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--rule); vertical-align: top;
  font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 600; }
figure { margin: 12px 0; } figcaption { color: var(--soft); font-size: 14px; }
svg { width: 100%; max-width: 760px; height: auto; display: block; }
svg text { font-size: 13px; fill: var(--soft); }
@media (max-width: 600px) { svg text { font-size: 17px; } }
.axis { stroke: #8a93a3; } .grid { stroke: #edf0f4; } .mark { stroke: #8a93a3; stroke-dasharray: 5 4; }
.line { fill: none; stroke-width: 2; } .band { fill: #dfe5ee; stroke: none; }
.s0 { stroke: #2f5fb3; --c: #2f5fb3; } .s1 { stroke: #d1622b; --c: #d1622b; } .s2 { stroke: #9aa5b5; --c: #9aa5b5; }
.s3 { stroke: #2a8c6e; --c: #2a8c6e; } .s4 { stroke: #8d4bb0; --c: #8d4bb0; } .s5 { stroke: #b8912a; --c: #b8912a; }
.s6 { stroke: #c2416c; --c: #c2416c; } .s7 { stroke: #4c9cc4; --c: #4c9cc4; } .s8 { stroke: #6b7280; --c: #6b7280; }
.bar, .dot { fill: var(--c); stroke: none; } .bar.band { fill: #dfe5ee; }
.line.s2 { stroke-width: 1.2; }
pre { overflow-x: auto; font-size: 13px; background: #f5f7fa; padding: 12px; border-radius: 6px; }
"""


def render_markdown(blocks: Sequence[Block]) -> str:
    """Returns the report as Markdown."""
    return "\n\n".join(text for block in blocks if (text := _to_markdown(block))) + "\n"


def render_html(title: str, blocks: Sequence[Block]) -> str:
    """Returns the report as one HTML page: style and pictures inside, no script, nothing to load."""
    body = "\n".join(_to_html(block) for block in blocks)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _to_markdown(block: Block) -> str:
    match block:
        case Heading():
            return f"{'#' * block.rank} {block.text}"
        case Paragraph():
            return block.text
        case Banner():
            return f"**{block.verdict}** {block.text}"
        case Table():
            rows = [block.header, ["---"] * len(block.header), *block.rows]
            return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)
        case Figure():
            return f"({block.caption} See `report.html` for the plot.)" if block.svg else ""
        case Code():
            return f"{block.title}:\n\n```\n{block.text}\n```"


def _to_html(block: Block) -> str:
    match block:
        case Heading():
            return f"<h{block.rank}>{escape(block.text)}</h{block.rank}>"
        case Paragraph():
            return f"<p>{escape(block.text)}</p>"
        case Banner():
            return f'<div class="banner {block.verdict}"><b>{block.verdict}</b><span>{escape(block.text)}</span></div>'
        case Table():
            head = "".join(f"<th>{escape(cell)}</th>" for cell in block.header)
            rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in block.rows)
            return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        case Figure():
            return f"<figure>{block.svg}<figcaption>{escape(block.caption)}</figcaption></figure>" if block.svg else ""
        case Code():
            return f"<details><summary>{escape(block.title)}</summary><pre>{escape(block.text)}</pre></details>"


def _cell(text: str) -> str:
    style = f' class="{text}"' if text in _VERDICTS else ""
    return f"<td{style}>{escape(text)}</td>"
