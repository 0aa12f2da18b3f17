"""A checkpoint of safetensors files as a mapping, of which each rank reads what it holds and no more."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from placement.lang.diagnostics import Diagnostic, PlacementError

if TYPE_CHECKING:
    from torch import Tensor

_INDEX, _FILE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file. The file is open only while a slice is read, so none of it stays mapped."""

    file: Path
    name: str
    shape: tuple[int, ...]

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """The slices, on the CPU: a tensor of its own."""
        with _opened(self.file) as content:
            if not self.shape or 0 in self.shape:
                return content.get_tensor(self.name)[index]
            return content.get_slice(self.name)[index]


class Checkpoint(Mapping[str, Stored]):
    """The tensors of a directory by name: of one ``model.safetensors`` or of those that its index names.

    Raises PlacementError (PLC406) where files are missing or are no safetensors.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._stored: dict[str, Stored] = {}
        placed = self._placed()
        for file in sorted({self.directory / name for name in placed.values()} or self._alone()):
            if not file.is_file():
                raise _unfit(f"{self.directory / _INDEX} names {file.name}, which is not there")
            with _opened(file) as content:
                for name in content.keys():  # noqa: SIM118 - it is no mapping
                    self._stored[name] = Stored(file, name, tuple(content.get_slice(name).get_shape()))
        if missing := sorted(set(placed) - set(self._stored)):
            raise _unfit(f"{placed[missing[0]]} has no {missing[0]}, though {_INDEX} says so")

    def __getitem__(self, name: str) -> Stored:
        return self._stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def _placed(self) -> Mapping[str, str]:
        """The file of each tensor as the index says; nothing where there is none."""
        index = self.directory / _INDEX
        if not index.is_file():
            return {}
        try:
            placed: Any = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise _unfit(f"{index} is no index of safetensors: {error}") from error
        if odd := [name for name, file in placed.items() if not isinstance(file, str)]:
            raise _unfit(f"{index} is no index of safetensors: {odd[0]} is in no file")
        return placed

    def _alone(self) -> set[Path]:
        if not (self.directory / _FILE).is_file():
            raise _unfit(f"{self.directory} has neither {_FILE} nor {_INDEX}")
        return {self.directory / _FILE}


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise _unfit(f"{file}: {error}") from error


def _unfit(text: str) -> PlacementError:
    return PlacementError([Diagnostic("PLC406", text)])
