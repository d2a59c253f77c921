"""The source files of a released package, one by one, without installing or building it.

    python ci/releases.py vllm==0.33.0 FOLDER    # unpack its Python files there

pip finds the release and fetches it, so its own settings (index, certificates, proxy) hold. It is read from
its source archive, or from a wheel for this interpreter where it has none.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from packaging.version import Version
from pip._internal.commands.download import DownloadCommand
from pip._internal.models.link import Link
from pip._internal.network.utils import HEADERS

# What is unpacked: code, and the metadata that says which release it is.
CODE = (".py", "/METADATA", "/PKG-INFO")


class Index:
    """What pip finds of a package. Use it in a `with`: pip keeps its session for that long."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._command = DownloadCommand("download", "")
        self._options, _ = self._command.parse_args([])
        self._found: dict[str, dict[Version, list[Link]]] = {}

    def __enter__(self) -> Index:
        logging.getLogger("pip").setLevel(logging.ERROR)  # that one of several indexes lacks it is no news
        self._stack.enter_context(self._command.main_context())
        self._session = self._command._build_session(self._options)
        self._finder = self._command._build_package_finder(
            self._options, self._session, ignore_requires_python=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def versions(self, package: str) -> list[Version]:
        """Every release that there is, oldest first, release candidates too."""
        return sorted(self._links(package))

    def unpack(self, package: str, version: Version, folder: Path) -> None:
        """Put all code of a release into a folder."""
        links = self._links(package).get(version, [])
        if not links:
            raise LookupError(f"{package} {version}: pip finds no such release for this interpreter")
        link = next((link for link in links if not link.is_wheel), links[-1])
        with tempfile.TemporaryFile() as file:
            with self._session.get(link.url_without_fragment, headers=HEADERS, stream=True) as answer:
                answer.raise_for_status()
                for chunk in answer.iter_content(1 << 20):
                    file.write(chunk)
            file.seek(0)
            for path, content in _code(file, link.is_wheel):
                if path.startswith("/") or ".." in path.split("/"):
                    raise ValueError(f"an archive holds {path!r}, which leads out of its folder")
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)

    def _links(self, package: str) -> dict[Version, list[Link]]:
        if package not in self._found:
            self._found[package] = {}
            for candidate in self._finder.find_all_candidates(package):
                self._found[package].setdefault(Version(str(candidate.version)), []).append(candidate.link)
        return self._found[package]


def _code(file: IO[bytes], is_wheel: bool) -> Iterator[tuple[str, bytes]]:
    """What of an archive is unpacked, by its path; a source archive has all in one folder."""
    if is_wheel:
        with zipfile.ZipFile(file) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist() if name.endswith(CODE))
        return
    with tarfile.open(fileobj=file) as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(CODE):
                yield member.name.partition("/")[2], archive.extractfile(member).read()


def main(release: str, folder: str) -> int:
    package, _, version = release.partition("==")
    with Index() as index:
        index.unpack(package, Version(version), Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
