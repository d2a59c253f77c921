"""The file form: a file is whole or not there, and what comes back is what went in."""

from __future__ import annotations

import json
import os
import signal
import stat
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from npu_replay import ReplayError, RoutedExperts, RouteStore
from npu_replay.errors import InvalidRoutes, RouteFileError
from npu_replay.routes import file as route_file
from npu_replay.routes import serialization
from npu_replay.routes.serialization import TensorFile
from writers import go_on, hanging_writer


def routes(tokens: int = 5, experts: int = 8, **changes: Any) -> RoutedExperts:
    scores = torch.rand(tokens, 2, experts, generator=torch.Generator().manual_seed(tokens))
    arguments: dict[str, Any] = {"fingerprint": 2**64 - 1, "weight_version": "v1"}
    arguments |= changes
    return RoutedExperts(
        ids=scores.topk(2).indices,
        layers=(1, 4),
        num_experts=experts,
        recorded=torch.arange(tokens) != 1,
        **arguments,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step_3.routes"


@pytest.mark.parametrize("experts", [8, 300])
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("version", [None, 3, "v1"])
def test_what_comes_back_is_what_went_in(path: Path, tokens: int, experts: int, version: Any) -> None:
    before = routes(tokens, experts, weight_version=version)
    before.save(path)
    after = RoutedExperts.load(path)
    assert after == before
    assert after.ids.dtype == before.ids.dtype


def test_a_path_may_be_text(path: Path) -> None:
    routes().save(str(path))
    assert RoutedExperts.load(str(path)) == routes()


def test_the_file_is_safetensors_that_others_can_read(path: Path) -> None:
    routes().save(path)
    assert torch.equal(load_file(path)["ids"], routes().ids)


def test_a_file_is_not_overwritten_unless_asked(path: Path) -> None:
    routes().save(path)
    with pytest.raises(RouteFileError, match="overwrite=True") as caught:
        routes(tokens=7).save(path)
    assert caught.value.where == str(path)
    assert RoutedExperts.load(path) == routes()
    routes(tokens=7).save(path, overwrite=True)
    assert RoutedExperts.load(path) == routes(tokens=7)


def test_a_folder_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(RouteFileError):
        routes().save(tmp_path)
    with pytest.raises(RouteFileError, match="can't be written"):
        routes().save(tmp_path, overwrite=True)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_write_that_fails_leaves_nothing_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch, step: str, failure: BaseException, overwrite: bool
) -> None:
    if overwrite:
        routes().save(path)

    def fail(*_: Any, **__: Any) -> None:
        raise failure

    class Broken:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Broken:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def fileno(self) -> int:
            return int(self.file.fileno())

        def write(self, data: bytes) -> None:
            self.file.write(data[: len(data) // 2])
            fail()

    if step == "write":
        native = Path.open
        monkeypatch.setattr(Path, "open", lambda *args: Broken(native(*args)))
    else:
        monkeypatch.setattr(os, step, fail)
    wanted = RouteFileError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(wanted):
        routes(tokens=7).save(path, overwrite=True)
    monkeypatch.undo()
    assert os.listdir(path.parent) == ([path.name] if overwrite else [])
    if overwrite:
        assert RoutedExperts.load(path) == routes()


@pytest.mark.parametrize("failure", [OSError(95, "Operation not supported"), KeyboardInterrupt()], ids=repr)
def test_a_new_file_that_gets_no_name_leaves_nothing_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def fail(*_: Any) -> None:
        raise failure

    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(RouteFileError if isinstance(failure, OSError) else KeyboardInterrupt):
        routes().save(path)
    assert os.listdir(path.parent) == []


def without_links(*_: Any) -> None:
    raise OSError(95, "Operation not supported")


def test_a_file_system_without_links_will_do(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", without_links)
    routes().save(path)
    assert RoutedExperts.load(path) == routes()
    assert os.listdir(path.parent) == [path.name]


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
        monkeypatch.setattr(os, "link", without_links)
    with pytest.raises(RouteFileError, match=r"is not overwritten.*overwrite=True") as caught:
        routes().save(path)
    assert caught.value.where == str(path)
    assert RoutedExperts.load(path) == routes(tokens=7)
    assert os.listdir(path.parent) == [path.name]


def test_a_writer_that_comes_between_the_look_and_the_name_is_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes(tokens=7).save(path)
    monkeypatch.setattr(Path, "exists", lambda _: False)
    with pytest.raises(RouteFileError, match="is not overwritten"):
        routes().save(path)
    monkeypatch.undo()
    assert RoutedExperts.load(path) == routes(tokens=7)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("mask", "rights"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)], ids=oct)
def test_a_saved_file_has_the_usual_rights(path: Path, mask: int, rights: int, overwrite: bool) -> None:
    before = os.umask(mask)
    try:
        routes().save(path, overwrite=overwrite)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == rights
    assert os.listdir(path.parent) == [path.name]


def test_the_umask_is_not_touched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the whole process's: another thread's new files would be open to all meanwhile."""

    def refuse(mask: int) -> int:
        pytest.fail(f"umask({mask:o})")

    monkeypatch.setattr(os, "umask", refuse)
    routes().save(path)
    routes().save(path, overwrite=True)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere" / "step_3.routes"
    with pytest.raises(RouteFileError, match="can't be written") as caught:
        routes().save(missing)
    assert caught.value.where == str(missing)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("step", ["exists", "open"])
def test_a_folder_without_the_right_to_read_or_write_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, step, refuse)
    with pytest.raises(RouteFileError, match=r"can't be written.*Permission denied") as caught:
        routes().save(path)
    assert caught.value.where == str(path)


def test_a_file_that_is_not_there_is_named(path: Path) -> None:
    with pytest.raises(RouteFileError, match="there is no such file") as caught:
        RoutedExperts.load(path)
    assert caught.value.where == str(path)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(RouteFileError) as caught:
        RoutedExperts.load(tmp_path)
    assert caught.value.where == str(tmp_path)


@pytest.mark.parametrize("content", [b"", b"hello", b"\0" * 5000, os.urandom(5000), b"\xff" * 8], ids=len)
def test_a_foreign_file_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(RouteFileError) as caught:
        RoutedExperts.load(path)
    assert caught.value.where == str(path)


def test_safetensors_of_something_else_are_refused_by_what_they_say(path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(RouteFileError, match=r"doesn't hold routes.*checkpoint"):
        RoutedExperts.load(path)
    save_file({"weight": torch.zeros(3)}, path, {"format": "pt"})
    with pytest.raises(RouteFileError, match="got pt"):
        RoutedExperts.load(path)


@pytest.mark.parametrize("said", ["[]", "3", "{", "null", '{"layers": 3}'])
def test_metadata_that_makes_no_sense_is_refused(path: Path, said: str) -> None:
    tensors = {"ids": routes().ids, "recorded": routes().recorded}
    save_file(tensors, path, {"format": serialization.FORMAT, "routes": said})
    with pytest.raises(RouteFileError):
        RoutedExperts.load(path)


def test_a_place_is_checked_without_a_trace(tmp_path: Path) -> None:
    route_file.check_place(tmp_path / "new", overwrite=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").write_text("kept")
    route_file.check_place(tmp_path / "old", overwrite=True)
    assert (tmp_path / "old").read_text() == "kept"
    for place in ("old", "nothing/new", "old/new"):
        with pytest.raises(RouteFileError, match=r"not overwritten|can't be written"):
            route_file.check_place(tmp_path / place, overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def write_said(path: Path, said: dict[str, Any], ids: torch.Tensor, recorded: torch.Tensor) -> None:
    """A file with a right digest, whatever it says."""
    data = [tensor.view(torch.uint8).numpy().tobytes() for tensor in (ids, recorded)]
    text = json.dumps(said | {"digest": serialization.digest(said, *data)})
    save_file({"ids": ids, "recorded": recorded}, path, {"format": serialization.FORMAT, "routes": text})


@pytest.mark.parametrize(
    "name", ["tokens", "layers", "topk", "num_experts", "dtype", "fingerprint", "weight_version"]
)
def test_metadata_that_lack_something_are_refused_though_the_digest_is_right(path: Path, name: str) -> None:
    said = serialization.header(routes())
    del said[name]
    write_said(path, said, routes().ids, routes().recorded)
    with pytest.raises(RouteFileError, match=rf"can't be read as routes.*{name}") as caught:
        RoutedExperts.load(path)
    assert caught.value.where == str(path)


@pytest.mark.parametrize("depth", [*range(900, 1000, 5), 5000, 100_000])
def test_metadata_that_are_nested_deeply_are_refused(path: Path, depth: int) -> None:
    """Some can be read, and are too deep only when they are written again for the checksum."""
    text = json.dumps(serialization.header(routes()) | {"digest": "x", "layers": ["deep", 4]})
    said = text.replace('"deep"', "[" * depth + "]" * depth)
    tensors = {"ids": routes().ids, "recorded": routes().recorded}
    save_file(tensors, path, {"format": serialization.FORMAT, "routes": said})
    with pytest.raises(RouteFileError) as caught:
        RoutedExperts.load(path)
    assert caught.value.where == str(path)


@pytest.mark.parametrize(("ids", "recorded"), [(torch.bfloat16, torch.bool), (torch.uint8, torch.bfloat16)])
def test_tensors_that_numpy_has_not_are_refused(path: Path, ids: torch.dtype, recorded: torch.dtype) -> None:
    said = serialization.header(routes()) | {"dtype": str(ids).removeprefix("torch.")}
    write_said(path, said, routes().ids.to(ids), routes().recorded.to(recorded))
    with pytest.raises(RouteFileError, match=r"can't be read as routes.*(bfloat16|BF16)"):
        RoutedExperts.load(path)


def test_a_file_cut_short_at_any_place_is_refused(path: Path) -> None:
    routes().save(path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(RouteFileError):
            RoutedExperts.load(path)


@pytest.mark.parametrize("flip", [0x01, 0x04, 0x80, 0xFF])
def test_one_changed_byte_anywhere_is_refused(path: Path, flip: int) -> None:
    routes(tokens=8).save(path)
    data = path.read_bytes()
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= flip
        path.write_bytes(changed)
        with pytest.raises(ReplayError):
            RoutedExperts.load(path)


def test_a_header_that_says_another_shape_than_the_ids_have_is_refused(path: Path) -> None:
    """The checksum covers the bytes, which are the same in every shape."""
    routes().save(path)
    data = path.read_bytes()
    assert data.count(b"[5,2,2]") == 1
    path.write_bytes(data.replace(b"[5,2,2]", b"[5,4,1]"))
    with pytest.raises(ReplayError):
        RoutedExperts.load(path)
    path.write_bytes(data.replace(b'"U8"', b'"I8"'))
    with pytest.raises(ReplayError):
        RoutedExperts.load(path)


def test_what_is_loaded_is_checked_as_data_from_outside_t32(path: Path) -> None:
    same = torch.tensor([[[0, 1]]]).expand(64, 1, 2)
    RoutedExperts(ids=same, layers=[3], num_experts=8).save(path)
    with pytest.raises(InvalidRoutes, match="layer 3: all 64 recorded rows are the same"):
        RoutedExperts.load(path)


def test_without_safetensors_files_are_read_and_to_write_them_the_error_says_what_to_do(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes().save(path)
    for name in [name for name in sys.modules if name.split(".")[0] == "safetensors"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    other = path.with_name("other.routes")
    with pytest.raises(RouteFileError, match=r"pip install 'npu-replay\[files\]'.*to_bytes"):
        routes().save(other)
    assert not other.exists()
    assert RoutedExperts.load(path) == routes()  # which takes nothing but the core


def test_the_metadata_say_what_is_in_the_file(path: Path) -> None:
    from safetensors import safe_open

    routes().save(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "npu_replay.routes.1"
    described = json.loads(metadata["routes"])
    assert (described["layers"], described["num_experts"]) == ([1, 4], 8)


# Files that change, writers that are killed


def change_in_place(path: Path, length: int | None = None) -> None:
    """As a copy over it, or a file system that lost its end: the file stays the same file."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b"\xff" * size) if length is None else file.truncate(length)


def test_what_was_loaded_stays_when_the_file_is_overwritten_in_place(path: Path) -> None:
    routes(tokens=5000).save(path)
    loaded = RoutedExperts.load(path)
    change_in_place(path)
    assert loaded == routes(tokens=5000)


def test_a_file_that_is_cut_short_after_it_was_loaded_kills_nobody(path: Path) -> None:
    """A memory map does, by SIGBUS: so it runs in a process of its own."""
    routes(tokens=50_000).save(path)
    program = (
        "import os, sys\n"
        "from npu_replay import RoutedExperts\n"
        "routes = RoutedExperts.load(sys.argv[1])\n"
        "os.truncate(sys.argv[1], 0)\n"
        "print(int(routes.ids.sum()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{int(routes(tokens=50_000).ids.sum())}\n"), done.stderr


def test_a_file_that_shrinks_while_it_is_read_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes(tokens=5000).save(path)
    file = TensorFile(path)
    change_in_place(path, length=10_000)
    with pytest.raises(ValueError, match="bytes early"):
        list(file.arrays("ids", "recorded"))


def test_what_a_killed_writer_left_is_removed_by_the_next(path: Path) -> None:
    with hanging_writer(path) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert len(os.listdir(path.parent)) == 1  # its scratch file
    routes().save(path)
    assert os.listdir(path.parent) == [path.name]
    assert RoutedExperts.load(path) == routes()


def test_what_a_living_writer_is_writing_is_left_alone(path: Path) -> None:
    with hanging_writer(path) as process:
        routes().save(path)
        assert RoutedExperts.load(path) == routes()
        assert len(os.listdir(path.parent)) == 2
        go_on(process)
    assert len(RoutedExperts.load(path)) == 5000  # the later of two that overwrite
    assert os.listdir(path.parent) == [path.name]


def test_a_finished_file_is_not_taken_for_a_rest_of_it(path: Path) -> None:
    """Killed between giving it its name and removing the other one, both are the same file."""
    routes().save(path)
    os.link(path, path.with_name(f".{path.name}.0.part"))
    routes(tokens=7).save(path.with_name("other"))
    assert RoutedExperts.load(path) == routes()
    routes(tokens=7).save(path, overwrite=True)
    assert sorted(os.listdir(path.parent)) == ["other", path.name]


def test_a_name_that_a_link_or_a_folder_has_is_no_rest(path: Path) -> None:
    kept = path.with_name("kept")
    kept.write_bytes(b"mine")
    path.with_name(f".{path.name}.0.part").symlink_to(kept)
    path.with_name(f".{path.name}.1.part").mkdir()
    routes().save(path)
    assert kept.read_bytes() == b"mine"
    assert len(os.listdir(path.parent)) == 4


def test_without_locks_files_are_written_and_nothing_is_removed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = path.with_name(f".{path.name}.0.part")
    rest.write_bytes(b"another writer's, perhaps")
    monkeypatch.setattr(route_file.fcntl, "flock", without_links)
    routes().save(path)
    assert RoutedExperts.load(path) == routes()
    assert rest.read_bytes() == b"another writer's, perhaps"


@pytest.mark.parametrize("given", ["a\0b", None, 3, b"bytes", ["a"], 2.5], ids=repr)
def test_what_is_no_path_is_refused(given: Any) -> None:
    for use in (RoutedExperts.load, routes().save, RouteStore, RouteStore.writer):
        with pytest.raises(RouteFileError, match="no path"):
            use(given)


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"]
)
def test_a_pipe_or_a_device_is_refused_and_not_waited_for(path: Path, make: Any) -> None:
    make(path)
    with pytest.raises(RouteFileError, match="no plain file"):
        RoutedExperts.load(path)


def test_a_full_disk_leaves_nothing_behind(path: Path) -> None:
    """RLIMIT_FSIZE stands in for it: the write itself fails."""
    program = (
        "import resource, sys, torch\n"
        "from npu_replay import ReplayError, RoutedExperts, RouteStore\n"
        "from pathlib import Path\n"
        "ids = torch.rand(50_000, 2, 8).topk(2).indices\n"
        "routes = RoutedExperts(ids=ids, layers=(1, 4), num_experts=8)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "path = Path(sys.argv[1])\n"
        "for write in (routes.save, lambda path: write_store(path, routes)):\n"
        "    try:\n"
        "        write(path)\n"
        "    except ReplayError as error:\n"
        "        print(error.problem)\n"
    )
    store = (
        "def write_store(path, routes):\n"
        "    with RouteStore.writer(path.parent / 'store') as writer:\n"
        "        writer.add(routes, 'k')\n"
    )
    done = subprocess.run([sys.executable, "-c", store + program, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("can't be written") == 2
    assert [str(left.relative_to(path.parent)) for left in path.parent.rglob("*")] == ["store"]


# What is written in a file twice


def said_of(path: Path) -> tuple[bytes, bytes]:
    """The header of a safetensors file and what follows it."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return data[8 : 8 + length], data[8 + length :]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"ids":{', b'"ids":{"dtype":"U8","shape":[5,2,2],"data_offsets":[0,20]},"ids":{'),
        (b'"format":"', b'"format":"npu_replay.routes.1","format":"'),
        (b'\\"topk\\": 2', b'\\"topk\\": 2, \\"topk\\": 2'),
        (b'"shape":[5,2,2]', b'"shape":[5,2,2],"shape":[5,2,2]'),
    ],
    ids=["a tensor", "metadata", "the routes' own header", "a shape"],
)
def test_a_key_that_stands_twice_is_refused(path: Path, before: bytes, after: bytes) -> None:
    """Of two values, readers take one each as they like."""
    routes().save(path)
    header, body = said_of(path)
    assert header.count(before) == 1
    header = header.replace(before, after)
    path.write_bytes(struct.pack("<Q", len(header)) + header + body)
    with pytest.raises(RouteFileError, match="stands twice"):
        RoutedExperts.load(path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"shape":[5]', b'"shape":[true,5]'),
        (b'"shape":[5]', b'"shape":[-5]'),
        (b'"shape":[5]', b'"shape":"5"'),
        (b'"shape":[5]', b'"shape":[18446744073709551616,0]'),
        (b'"data_offsets":[', b'"data_offsets":[0,'),
        (b'"data_offsets":[0,', b'"data_offsets":[1,'),
        (b'"BOOL"', b'["BOOL"]'),
        (b'"BOOL"', b'"U8"'),
        (b'{"__metadata__":{', b'{"__metadata__":{"more":3,'),
        (b'{"__metadata__":{', b'{"more":[],"__metadata__":{'),
        (b'{"__metadata__":{', b'{"more":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"__metadata__":{'),
    ],
    ids=str,
)
def test_a_crafted_header_is_refused(path: Path, before: bytes, after: bytes) -> None:
    routes().save(path)
    header, body = said_of(path)
    assert before in header
    header = header.replace(before, after, 1)
    path.write_bytes(struct.pack("<Q", len(header)) + header + body)
    with pytest.raises(RouteFileError) as caught:
        RoutedExperts.load(path)
    assert str(path) in caught.value.where


def test_a_mask_of_other_bytes_than_0_and_1_is_refused_though_its_digest_is_right(path: Path) -> None:
    given = routes()
    odd = torch.tensor([0, 1, 2, 3, 255], dtype=torch.uint8)
    write_said(path, serialization.header(given), given.ids, odd.view(torch.bool))
    with pytest.raises(RouteFileError, match="isn't a mask"):
        RoutedExperts.load(path)
