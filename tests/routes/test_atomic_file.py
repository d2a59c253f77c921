"""The file form: a file is whole or not there. What is in it: test_encoding.py."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest
from safetensors.torch import save_file

from npu_replay import RoutedExperts, RouteStore
from npu_replay.errors import RouteFileError
from npu_replay.routes.encoding import FORMAT
from routes.test_encoding import routes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step_3.routes"


def test_a_file_is_not_overwritten_unless_asked(path: Path) -> None:
    routes().save(path)
    with pytest.raises(RouteFileError, match="overwrite=True") as caught:
        routes(tokens=7).save(path)
    assert caught.value.where == str(path)
    assert RoutedExperts.load(path) == routes()
    routes(tokens=7).save(path, overwrite=True)
    assert RoutedExperts.load(path) == routes(tokens=7)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("steps", [("fsync",), ("link", "replace")], ids=str)
@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_write_that_fails_leaves_nothing_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch, steps: Sequence[str], failure: BaseException, overwrite: bool
) -> None:
    if overwrite:
        routes().save(path)
    for step in steps:
        monkeypatch.setattr(os, step, mock.Mock(side_effect=failure))
    with pytest.raises(RouteFileError if isinstance(failure, OSError) else KeyboardInterrupt):
        routes(tokens=7).save(path, overwrite=overwrite)
    monkeypatch.undo()
    assert os.listdir(path.parent) == ([path.name] if overwrite else [])
    if overwrite:
        assert RoutedExperts.load(path) == routes()


@pytest.mark.parametrize(
    ("place", "broken"), [("nowhere/step_3", None), ("", None), ("step_3", "exists"), ("step_3", "open")]
)
def test_a_place_that_cant_be_written_to_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch, place: str, broken: str | None
) -> None:
    """A folder that isn't there, or may not be read or written; or the path is a folder itself."""
    path.mkdir()
    if broken:
        monkeypatch.setattr(Path, broken, mock.Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(RouteFileError, match=r"can't be written") as caught:
        routes().save(path / place, overwrite=broken is None)
    assert caught.value.where == str(path / place)
    monkeypatch.undo()
    assert list(path.parent.rglob("*")) == [path]


@pytest.mark.parametrize("links", [True, False])
def test_of_two_writers_at_once_the_first_is_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """The second begins, and ends, while the first is at work."""
    native = os.fsync

    def faster(handle: int) -> None:
        monkeypatch.setattr(os, "fsync", native)
        routes(tokens=7).save(path)

    monkeypatch.setattr(os, "fsync", faster)
    if not links:
        monkeypatch.setattr(os, "link", mock.Mock(side_effect=OSError(95, "Operation not supported")))
    with pytest.raises(RouteFileError, match=r"is not overwritten.*overwrite=True") as caught:
        routes().save(path)
    assert caught.value.where == str(path)
    assert RoutedExperts.load(path) == routes(tokens=7)
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("mask", "rights"), [(0o022, 0o644), (0o077, 0o600)], ids=oct)
def test_a_saved_file_has_the_usual_rights(path: Path, mask: int, rights: int, overwrite: bool) -> None:
    """And the umask isn't touched: it is the whole process's, another thread's files would be open to all."""
    before = os.umask(mask)
    try:
        with mock.patch.object(os, "umask", side_effect=AssertionError):
            routes().save(path, overwrite=overwrite)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == rights
    assert os.listdir(path.parent) == [path.name]


# What is no file of routes


def safetensors(path: Path, **metadata: str) -> None:
    save_file({"ids": routes().ids, "recorded": routes().recorded}, path, metadata or None)


def shard(path: Path) -> None:
    with RouteStore.writer(path.parent / "store") as writer:
        writer.add(routes(), "k")
    [written] = (path.parent / "store").iterdir()
    written.rename(path)


UNREADABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda path: None, "there is no such file"),
    "a folder": (Path.mkdir, ""),
    "a pipe": (os.mkfifo, "no plain file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "no plain file"),
    **{
        f"{len(content)} bytes": (lambda path, content=content: path.write_bytes(content), "")
        for content in (b"", b"\0" * 5000, b"\xff" * 8)
    },
    "a checkpoint": (safetensors, r"doesn't hold routes.*checkpoint"),
    "a shard": (lambda path: shard(path), "one sample without a key, .*got 1 others.*by its folder"),
    **{
        f"routes {text}": (lambda path, text=text: safetensors(path, format=FORMAT, routes=text), "")
        for text in ("3", "{", '{"layers": 3}')
    },
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_is_no_file_of_routes_is_refused_by_name(path: Path, what: str) -> None:
    make, words = UNREADABLE[what]
    make(path)
    with pytest.raises(RouteFileError, match=words or None) as caught:
        RoutedExperts.load(path)
    assert caught.value.where == str(path)
