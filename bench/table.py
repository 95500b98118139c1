"""Lays out Markdown tables for the programs here, readable in a terminal as well."""

from __future__ import annotations

from collections.abc import Sequence


def align(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up; the second line is its rule, where `---:` is a column of numbers."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rows = []
    for line in lines:
        cells = [
            cell.rjust(width) if rule.endswith(":") else cell.ljust(width)
            for cell, width, rule in zip(line, widths, lines[1])
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)
