"""What the pages of a terminal have in common: a width, styles, and lines that fit."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from placement.report.facts import Facts

MIN_WIDTH = 60
_STYLES = {"bold": "1", "dim": "2", "action": "36"}


class Page:
    """Lines of at most ``width`` characters (60 at least). ``color`` adds ANSI styles."""

    def __init__(self, width: int, *, color: bool) -> None:
        self.width, self.color = max(width, MIN_WIDTH), color

    def heading(self, found: Facts) -> Iterator[str]:
        """Which spec, on which mesh, priced for which device and link."""
        mesh = ", ".join(f"{axis} = {n}" for axis, n in found.mesh.items())
        left = f"{' '.join(found.files) or 'plan'} on mesh {mesh}"
        yield from self.sides(left, f"device {found.device}, {_links(found)}", "bold")

    def groups(self, found: Facts, used: Collection[str]) -> Iterator[str]:
        """Of which axes the groups are that are ``used``."""
        for name, group in found.groups.items():
            over = f", link {group.link}" if len(set(found.links.values())) > 1 else ""
            if name in used:
                axes = f"{', '.join(group.axes[:-1])} and {group.axes[-1]}"
                yield self.paint(self.shorten(f"{name} is {axes} together, {group.ranks} ranks{over}"), "dim")

    def sides(self, left: str, right: str, left_style: str = "", right_style: str = "") -> Iterator[str]:
        """One text at the left margin and one at the right; on two lines where they do not fit one."""
        if not right:
            yield self.paint(self.shorten(left), left_style)
        elif len(left) + 2 + len(right) <= self.width:
            gap = " " * (self.width - len(left) - len(right))
            yield self.paint(left, left_style) + gap + self.paint(right, right_style)
        else:
            yield self.paint(self.shorten(left), left_style)
            for line in textwrap.wrap(right, self.width - 6, break_on_hyphens=False):
                yield self.paint(self.shorten(line.rjust(self.width)), right_style)

    def broken(self, line: str) -> Iterator[str]:
        """``a -> b`` on two lines where it does not fit one."""
        if len(line) <= self.width or " -> " not in line:
            yield self.shorten(line)
        else:
            source, _, target = line.partition(" -> ")
            yield self.shorten(source)
            yield self.shorten(target, "      -> ")

    def fill(self, label: str, text: str, indent: int = 9) -> Iterator[str]:
        """A labelled paragraph; the text starts at column ``indent``."""
        lines = textwrap.wrap(text, self.width - indent, break_on_hyphens=False) or [""]
        yield self.paint(f"{label:<{indent}}", "bold") + lines[0]
        yield from (" " * indent + line for line in lines[1:])

    def shorten(self, line: str, lead: str = "") -> str:
        """``lead`` and ``line``, which fit: of a longer line the indent and the end, which tells names apart."""
        if len(lead) + len(line) <= self.width:
            return lead + line
        body = line.lstrip()
        lead += line[: len(line) - len(body)]
        return f"{lead}...{body[len(lead) + 3 - self.width :]}"

    def paint(self, text: str, style: str) -> str:
        """``text`` in a style, '' for none, where the page has colours."""
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if self.color and style and text.strip() else text


def _links(found: Facts) -> str:
    """``link nvlink``, or ``dp over ib, tp over nvlink``."""
    if len(set(found.links.values())) == 1:
        return f"link {next(iter(found.links.values()))}"
    return ", ".join(f"{axis} over {link}" for axis, link in found.links.items())
