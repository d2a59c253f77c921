"""The source files of a released package, one by one, without installing or building it.

    python ci/releases.py vllm==0.33.0 FOLDER    # unpack its Python files there

pip finds the release and fetches it, so its own settings (index, certificates, proxy) hold. It is read from
its source archive, or from a wheel for this interpreter where it has none.
"""

from __future__ import annotations

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
from pip._internal.network.utils import HEADERS

# What is unpacked: code, and the metadata that says which release it is.
CODE = (".py", "/METADATA", "/PKG-INFO")


def unpack(package: str, version: Version, folder: Path) -> None:
    """Put all code of a release into a folder."""
    logging.getLogger("pip").setLevel(logging.ERROR)  # that one of several indexes lacks it is no news
    command = DownloadCommand("download", "")
    options, _ = command.parse_args([])
    with command.main_context(), tempfile.TemporaryFile() as file:
        session = command._build_session(options)
        finder = command._build_package_finder(options, session, ignore_requires_python=True)
        candidates = finder.find_all_candidates(package)
        links = [candidate.link for candidate in candidates if Version(str(candidate.version)) == version]
        if not links:
            raise SystemExit(f"{package} {version}: pip finds no such release for this interpreter")
        link = next((link for link in links if not link.is_wheel), links[-1])
        with session.get(link.url_without_fragment, headers=HEADERS, stream=True) as answer:
            answer.raise_for_status()
            for chunk in answer.iter_content(1 << 20):
                file.write(chunk)
        file.seek(0)
        for path, content in _code(file, link.is_wheel):
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


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


def main(release: str, folder: str) -> None:
    package, _, version = release.partition("==")
    unpack(package, Version(version), Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
