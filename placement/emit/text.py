"""Small pieces of Python text: comments, loops, literals, structures."""

from __future__ import annotations

import keyword
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

WIDTH = 110
COMMENT = 68  # where comments start, at least


def is_literal(value: Any) -> bool:
    """Whether the value can be written as it is."""
    return value is None or isinstance(value, bool | int | float | str)


def fixed(value: Any) -> bool:
    """Whether an argument of the example can be written down: literals, and containers of them."""
    if type(value) in (list, tuple):
        return all(map(fixed, value))
    if type(value) is dict:
        return all(isinstance(key, str) and fixed(item) for key, item in value.items())
    return is_literal(value) and value == value  # noqa: PLR0124 - a nan equals nothing


def held(name: str, value: Any) -> list[str]:
    """Lines that refuse an argument that is not the example's, where it is no tensor: they chose what was captured."""
    if fixed(value):
        test = f"{name} is not None" if value is None else f"{name} != {value!r}"
        text = f"{name} was {value!r} when the model was captured, not "
        return [f"if {test}:", f"    raise ValueError({text!r} + repr({name}))"]
    if type(value) is dict:
        lines = [f"if {name}.keys() != {{{', '.join(map(repr, value))}}}:"]
        lines.append(f"    raise ValueError({f'{name} had the keys {list(value)} when the model was captured'!r})")
        return [*lines, *(line for key, item in value.items() for line in held(f"{name}[{key!r}]", item))]
    if type(value) in (list, tuple):
        lines = [f"if len({name}) != {len(value)}:"]
        lines.append(f"    raise ValueError({f'{name} had {len(value)} items when the model was captured'!r})")
        return [*lines, *(line for index, item in enumerate(value) for line in held(f"{name}[{index}]", item))]
    return []


def dtype_kind(dtype: torch.dtype) -> str:
    """The kind that inputs are held to."""
    if dtype.is_floating_point:
        return "float"
    return "bool" if dtype is torch.bool else "complex" if dtype.is_complex else "int"


def member(name: str, text: str) -> str:
    """A keyword argument, also under a name that is no identifier."""
    return f"{name}={text}" if name.isidentifier() and not keyword.iskeyword(name) else f"**{{{name!r}: {text}}}"


def commented(line: str, comment: str) -> str:
    """The line with a comment in the comments' column."""
    return f"{line:<{COMMENT}}  # {comment}"


def folded_paths(paths: Sequence[str]) -> str:
    """``model.layers.*.mlp`` for paths that differ in their numbers only."""
    folded = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", path) for path in paths)
    return textwrap.shorten(", ".join(folded), WIDTH - 12, placeholder=" …") + "."


_CALL = re.compile(r"^(?P<target>\S.*?) = self\.(?P<list>[\w.]+)\[(?P<index>\d+)\]\((?P<rest>.*)\)$")


def merged(lines: Sequence[str]) -> list[str]:
    """Consecutive calls of a list's modules that read the same but for the index, as a loop."""
    result: list[str] = []
    position = 0
    while position < len(lines):
        match = _CALL.match(lines[position])
        end = position + 1
        if match:
            while end < len(lines) and _continues(match, lines[end], end - position):
                end += 1
        if match is None or end - position < 2:
            result.append(lines[position])
            position += 1
            continue
        first, count = int(match["index"]), end - position
        item = match["list"].rsplit(".", 1)[-1]
        item = item.removesuffix("s") if item.endswith("s") and len(item) > 1 else f"{item}_module"
        part = (
            ""
            if first == 0 and end - position == count and not _longer(match, lines, end)
            else f"[{first}:{first + count}]"
        )
        result.append(f"for {item} in self.{match['list']}{part}:\n    {match['target']} = {item}({match['rest']})")
        position = end
    return result


def _continues(first: re.Match[str], line: str, offset: int) -> bool:
    match = _CALL.match(line)
    return (
        match is not None
        and (match["target"], match["list"], match["rest"]) == (first["target"], first["list"], first["rest"])
        and int(match["index"]) == int(first["index"]) + offset
        and _carries(first)
    )


def _carries(match: re.Match[str]) -> bool:
    """Whether each call takes what the one before gave, so that a loop does the same."""
    return match["target"] in [argument.strip() for argument in match["rest"].split(",")]


def returned(lines: Sequence[str]) -> list[str]:
    """A result that is only returned is returned where it is made."""
    if len(lines) > 1:
        match = re.fullmatch(r"return (\w+)", lines[-1])
        if match and lines[-2].startswith(f"{match[1]} = ") and "#" not in lines[-2] and "\n" not in lines[-2]:
            return [*lines[:-2], f"return {lines[-2].removeprefix(f'{match[1]} = ')}"]
    return list(lines)


def _longer(first: re.Match[str], lines: Sequence[str], end: int) -> bool:
    return any((m := _CALL.match(line)) and m["list"] == first["list"] for line in lines[end:])


def structure(spec: pytree.TreeSpec, leaves: Iterator[str]) -> str:
    """The text of a result of the structure that the original returns."""
    if spec.is_leaf():
        return next(leaves)
    children = [structure(child, leaves) for child in spec.children()]
    if spec.type is tuple:
        return f"({', '.join(children)}{',' if len(children) == 1 else ''})"
    if spec.type is list:
        return f"[{', '.join(children)}]"
    if (
        isinstance(spec.context, list | tuple)
        and len(spec.context) == len(children)
        and all(isinstance(k, str) for k in spec.context)
    ):
        if spec.type is dict:
            return "{" + ", ".join(f"{k!r}: {c}" for k, c in zip(spec.context, children, strict=True)) + "}"
        return f"rt.Output({', '.join(member(k, c) for k, c in zip(spec.context, children, strict=True))})"
    return f"({', '.join(children)}{',' if len(children) == 1 else ''})"


def class_name(original: type) -> str:
    """The name of a class as one that Python takes: a class made by ``type(...)`` may have any."""
    name = re.sub(r"\W", "_", original.__name__)
    return name if name.isidentifier() and not keyword.iskeyword(name) else f"_{name}"
