"""The file form of RoutedExperts: safetensors, with everything about it in the metadata."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from npu_replay import json_text
from npu_replay.errors import RouteFileError, shown
from npu_replay.routes import wire as route_bytes
from npu_replay.routes.tensor_file import UNREADABLE, TensorFile

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from npu_replay.routes.routed_experts import RoutedExperts

FORMAT = "npu_replay.routes.1"


def save(routes: RoutedExperts, path: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Write `routes` to `path`, whole or not at all."""
    path = as_path(path)
    require_safetensors()
    from safetensors.torch import save as serialize

    described = route_bytes.header(routes)
    recorded = routes.recorded.numpy().tobytes()
    described["digest"] = route_bytes.digest(described, routes.ids.numpy().tobytes(), recorded)
    metadata = {"format": FORMAT, "routes": json.dumps(described, sort_keys=True)}
    data = serialize({"ids": routes.ids.contiguous(), "recorded": routes.recorded.contiguous()}, metadata)
    write_whole(path, data, overwrite=overwrite)


def parse(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the arguments of RoutedExperts from the file at `path`."""
    where = str(path)
    try:
        file = TensorFile(as_path(path))
        if file.metadata.get("format") != FORMAT:
            raise RouteFileError(
                "this safetensors file doesn't hold routes",
                where=where,
                expected=f"metadata format {FORMAT!r}",
                got=file.metadata.get("format"),
                cause="a file of something else (a checkpoint?), or of another version of npu_replay",
            )
        described = json_text.parse(file.metadata["routes"])
        route_bytes.shape_of(described)
        ids, recorded = file.arrays("ids", "recorded")
        return route_bytes.arguments(described, ids, recorded)
    except RouteFileError as error:
        raise error.at(where) from error.__cause__
    except FileNotFoundError as error:
        raise RouteFileError("there is no such file", where=where) from error
    except UNREADABLE as error:
        raise RouteFileError(
            f"this file can't be read as routes ({error})",
            where=where,
            cause="it was cut short, damaged, or isn't a safetensors file",
        ) from error


def as_path(path: Any) -> Path:
    """The path that a caller gave.

    Raises:
        RouteFileError: it isn't one.
    """
    try:
        found = Path(path)
    except TypeError:
        found = None
    if found is None or "\0" in str(found):
        raise RouteFileError("this is no path", expected="text or a pathlib.Path", got=shown(path))
    return found


def write_whole(path: Path, data: bytes, *, overwrite: bool) -> None:
    """Write a file so that nobody ever sees half of it; of writers that don't overwrite only one succeeds.

    Raises:
        RouteFileError: the file is there and `overwrite` isn't set, or it can't be written.
    """
    with written(path, data, overwrite=overwrite):
        pass


def check_place(path: Path, *, overwrite: bool) -> None:
    """Refuse before minutes of work what `write_whole` would refuse after them."""
    scratch, file = _begun(path, overwrite=overwrite)
    scratch.unlink(missing_ok=True)
    file.close()


@contextmanager
def written(path: Path, data: bytes, *, overwrite: bool) -> Iterator[None]:
    """`write_whole`, and what belongs to the file is done in the block: until it ends, or this process does,
    nobody takes the file for left behind (`remove_left`).

    Raises:
        RouteFileError: the file is there and `overwrite` isn't set, or it can't be written.
    """
    scratch, file = _begun(path, overwrite=overwrite)
    with file:  # and locked
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            _name(scratch, path, overwrite=overwrite)
        except BaseException as error:
            with suppress(OSError):
                scratch.unlink()
            if isinstance(error, OSError):
                raise RouteFileError(f"the file can't be written ({error})", where=str(path)) from error
            raise
        yield


def _begun(path: Path, *, overwrite: bool) -> tuple[Path, BinaryIO]:
    try:
        if not overwrite:
            _refuse_existing(path)  # before anything is written
        return _scratch(path)
    except OSError as error:
        raise RouteFileError(f"the file can't be written ({error})", where=str(path)) from error


def _scratch(path: Path) -> tuple[Path, BinaryIO]:
    """A new file beside `path`, locked while it is open. What a killed writer left there is removed; what one
    that lives is writing isn't."""
    for number in itertools.count():
        scratch = path.with_name(f".{path.name}.{number}.part")
        remove_left(scratch)
        try:
            file = scratch.open("xb")  # with the rights that the umask leaves
        except FileExistsError:
            continue
        with suppress(OSError):  # without locks nothing is removed, either
            _lock(file, wait=True)
        if os.fstat(file.fileno()).st_nlink:
            return scratch, file
        file.close()  # somebody else removed it before it was locked
    raise AssertionError


def remove_left(path: Path, unless: Path | None = None) -> None:
    """Remove a file that `written` left half done as its process was killed.

    The lock of a process ends with it, whoever killed it. A file system without locks has nothing removed.

    Args:
        path: the file; often there is none.
        unless: a file beside which it isn't half done.
    """
    if not path.is_file() or path.is_symlink():
        return
    with suppress(OSError), path.open("r+b") as file:  # to be written, or NFS won't lock it
        _lock(file, wait=False)
        if unless is None or not unless.exists():
            path.unlink()


def _lock(file: BinaryIO, *, wait: bool) -> None:
    if fcntl is None:
        raise OSError("this system has no such locks")
    fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def _name(scratch: Path, path: Path, *, overwrite: bool) -> None:
    """Give what is written its name; a link, unlike a rename, fails where another writer was faster."""
    if not overwrite:
        try:
            os.link(scratch, path)
        except FileExistsError as error:
            raise _is_there(path) from error
        except OSError:  # a file system without links
            _refuse_existing(path)
        else:
            return scratch.unlink()
    os.replace(scratch, path)


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise _is_there(path)


def _is_there(path: Path) -> RouteFileError:
    return RouteFileError(
        "the file is there already and is not overwritten",
        where=str(path),
        cause="an earlier run; pass overwrite=True (--force on the command line) to replace it",
    )


def require_safetensors() -> None:
    """Raises RouteFileError, with what to do, where safetensors isn't installed."""
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise RouteFileError(
            "writing files of routes needs the package safetensors",
            cause="the core is installed without its extras: pip install 'npu-replay[files]', or use "
            "to_bytes() and from_bytes(), which need nothing",
        ) from error
