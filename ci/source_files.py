"""The source files of one release, wherever they lie."""

from __future__ import annotations

import zipfile
from abc import ABC, abstractmethod
from pathlib import Path


class Release(ABC):
    """The files of one release, by their path from the package's root, e.g. «vllm/outputs.py»."""

    @abstractmethod
    def paths(self) -> list[str]:
        """All that it has."""

    @abstractmethod
    def read(self, path: str) -> str | None:
        """A file's text; None where there is no such file."""


class Folder(Release):
    """A release that lies on disk, unpacked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def paths(self) -> list[str]:
        return [
            file.relative_to(self._folder).as_posix() for file in self._folder.rglob("*") if file.is_file()
        ]

    def read(self, path: str) -> str | None:
        file = self._folder / path
        return file.read_text(encoding="utf-8") if file.is_file() else None


class Wheel(Release):
    """A wheel, of which only the files that are asked for are fetched."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._names = set(archive.namelist())

    def paths(self) -> list[str]:
        return sorted(self._names)

    def read(self, path: str) -> str | None:
        return self._archive.read(path).decode("utf-8") if path in self._names else None
