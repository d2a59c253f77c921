"""The file form of RoutedExperts: safetensors, with everything about it in the metadata."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from npu_replay import route_bytes
from npu_replay.errors import RouteFileError

if TYPE_CHECKING:
    from npu_replay.routed_experts import RoutedExperts

FORMAT = "npu_replay.routes.1"


def save(routes: RoutedExperts, path: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Write `routes` to `path`, whole or not at all."""
    require_safetensors()
    from safetensors.torch import save as serialize

    described = route_bytes.header(routes)
    recorded = routes.recorded.numpy().tobytes()
    described["digest"] = route_bytes.digest(described, routes.ids.numpy().tobytes(), recorded)
    metadata = {"format": FORMAT, "routes": json.dumps(described, sort_keys=True)}
    data = serialize({"ids": routes.ids.contiguous(), "recorded": routes.recorded.contiguous()}, metadata)
    write_whole(Path(path), data, overwrite=overwrite)


def parse(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the arguments of RoutedExperts from the file at `path`."""
    require_safetensors()
    from safetensors import SafetensorError, safe_open

    where = str(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise RouteFileError(
                    "this safetensors file doesn't hold routes",
                    where=where,
                    expected=f"metadata format {FORMAT!r}",
                    got=metadata.get("format"),
                    cause="a file of something else (a checkpoint?), or of another version of npu_replay",
                )
            described = json.loads(metadata["routes"])
            said = *route_bytes.shape_of(described), described["dtype"]
            ids, recorded = file.get_tensor("ids"), file.get_tensor("recorded")
        found = described.pop("digest", None)
        digest = route_bytes.digest(described, ids.numpy().tobytes(), recorded.numpy().tobytes())
    except FileNotFoundError as error:
        raise RouteFileError("there is no such file", where=where) from error
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RouteFileError(
            f"this file can't be read as routes ({error})",
            where=where,
            cause="it was cut short, damaged, or isn't a safetensors file",
        ) from error
    there = *ids.shape, str(ids.dtype).removeprefix("torch.")
    if there != said:
        raise RouteFileError(
            "the metadata and the ids don't agree",
            where=where,
            expected=f"shape and dtype {said}",
            got=there,
            cause="a tool that rewrote the tensors",
        )
    if digest != found:
        raise RouteFileError(
            "the file was changed after it was written",
            where=where,
            expected=f"checksum {found}",
            got="another",
            cause="a damaged disk or transfer, or somebody edited it",
        )
    return route_bytes.arguments(described, ids, recorded)


def write_whole(path: Path, data: bytes, *, overwrite: bool) -> None:
    """Write a file so that nobody ever sees half of it; of writers that don't overwrite only one succeeds.

    Raises:
        RouteFileError: the file is there and `overwrite` isn't set, or it can't be written.
    """
    scratch = _begun(path, overwrite=overwrite)
    try:
        with scratch.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _name(scratch, path, overwrite=overwrite)
    except OSError as error:
        raise RouteFileError(f"the file can't be written ({error})", where=str(path)) from error
    finally:
        scratch.unlink(missing_ok=True)


def check_place(path: Path, *, overwrite: bool) -> None:
    """Refuse before minutes of work what `write_whole` would refuse after them."""
    _begun(path, overwrite=overwrite).unlink(missing_ok=True)


def _begun(path: Path, *, overwrite: bool) -> Path:
    """An empty file beside it, with the rights that the umask leaves."""
    scratch = path.with_name(f".{path.name}.{uuid4().hex[:8]}.part")
    try:
        if not overwrite:
            _refuse_existing(path)
        scratch.touch(exist_ok=False)
    except OSError as error:
        raise RouteFileError(f"the file can't be written ({error})", where=str(path)) from error
    return scratch


def _name(scratch: Path, path: Path, *, overwrite: bool) -> None:
    """Give what is written its name; a link, unlike a rename, fails where another writer was faster."""
    if not overwrite:
        try:
            return os.link(scratch, path)
        except FileExistsError as error:
            raise _is_there(path) from error
        except OSError:  # a file system without links
            _refuse_existing(path)
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
            "files of routes need the package safetensors",
            cause="the core is installed without its extras: pip install 'npu-replay[files]', or use "
            "to_bytes() and from_bytes(), which need nothing",
        ) from error
