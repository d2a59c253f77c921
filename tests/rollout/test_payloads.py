"""Arrays of somebody else's: sizes are checked before memory is taken, and no pickle is ever run."""

from __future__ import annotations

import base64
import io
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from npu_replay.errors import InvalidRoutes
from npu_replay.rollout.payloads import from_base64, from_lists, from_npy
from npu_replay.rollout.release_rules import Fault, Source, Symptom

SOURCE = Source(
    engine="Engine",
    version="1.2",
    sample="request 3",
    field="rows",
    faults=(Fault(symptom=Symptom.UNREADABLE, cause="an old encoder"),),
)
MOST = 1 << 20
SHAPE_MOST = (100, 10, 8)
TOO_MANY = Symptom.TOO_MANY_ROWS


def npy(array: Any, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asanyarray(array), version=version)
    return file.getvalue()


def raw(header: str | bytes, body: bytes = b"", version: int = 1) -> bytes:
    """An .npy with any header."""
    text = header.encode() if isinstance(header, str) else header
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + body


def claims(shape: str, descr: str = "'|u1'") -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n"


def refused(read: Callable[[], Any], symptom: Symptom = Symptom.UNREADABLE) -> InvalidRoutes:
    """The error, which says whose data it is."""
    with pytest.raises(InvalidRoutes) as caught:
        read()
    assert str(caught.value).startswith("[npu_replay] Engine 1.2, request 3, rows: ")
    assert (caught.value.cause == "an old encoder") == (symptom is Symptom.UNREADABLE)
    assert len(str(caught.value)) < 800
    return caught.value


# .npy


@pytest.mark.parametrize("version", [(1, 0), (2, 0)], ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_npy_of_integers_is_read(order: Any, version: tuple[int, int]) -> None:
    for dtype in ("u1", "u2", "i2", "i4", "i8", "u8", ">i4", ">u2", "i1"):
        for rows in (5, 0):
            array = np.arange(rows * 12).reshape(rows, 3, 4).astype(dtype, order=order)
            found = from_npy(npy(array, version), source=SOURCE, most=MOST)
            assert found.dtype == array.dtype
            assert np.array_equal(found, array)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_an_npy_is_not_copied(kind: Callable[[bytes], Any]) -> None:
    data = kind(npy(np.zeros((1000, 10, 8), np.uint8)))
    assert np.shares_memory(from_npy(data, source=SOURCE, most=80_000), np.frombuffer(data, np.uint8))


@pytest.fixture
def memory() -> Iterator[Callable[[], int]]:
    """How many bytes are taken now."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


def test_sizes_are_checked_before_memory_is_taken(memory: Callable[[], int]) -> None:
    shapes = f"({2**23}, 61, 8)", f"({2**40}, 61, 8)", f"({2**62}, 0, 8)", "(-1, 3, 2)", "(True, 1, 1)"
    data = [raw(claims(shape, "'<i8'"), b"abc") for shape in (*shapes, "(1, 1)", "(" + "1, " * 65 + ")")]
    text = base64.b64encode(bytes(3_000_000)).decode()
    lists = [[[1] * 8] * 10] * 1_000_000
    refused(lambda: from_npy(b"", source=SOURCE, most=24))  # the first error keeps the address of a page
    tracemalloc.clear_traces()
    for number, one in enumerate(data):
        refused(lambda: from_npy(one, source=SOURCE, most=MOST), TOO_MANY if number == 0 else Symptom.SHAPE)  # noqa: B023
    assert refused(lambda: from_base64(text, source=SOURCE, most=1_000_000), TOO_MANY).got == "some 3000000"
    refused(lambda: from_lists(lists, source=SOURCE, most=SHAPE_MOST))
    assert memory() < 100_000
    from_base64(text, source=SOURCE, most=3_000_000)
    assert memory() < 3_200_000


GOOD = claims("(1, 1, 1)")


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\x93NUMPY\x01\x00\xff", b"PK\x03\x04" + bytes(60), b"\x80\x04K\x01."),
        *(npy(np.zeros((2, 1, 1), dtype)) for dtype in ("f4", "?", "U3", "M8[s]", "i4,i4", "O")),
        *(raw(GOOD, b"\x01", version) for version in (3, 9)),
        *(
            raw(header, b"\x01")
            for header in (
                *("", "{", "[" * 3000, "-" * 3000 + "1", b"\xff\xfe\x00", "{}"),
                "__import__('os').mkdir('/tmp/never')",
                *(claims("(1, 1, 1)", descr) for descr in ("('<i4',)", "None", "'|u3'")),
                *(claims(shape) for shape in ("[1, 1, 1]", "(1, 1, 'a')", "(" + "9" * 5000 + ", 1, 1)")),
                GOOD + " " * 5000,
                GOOD.replace("False", "7"),
            )
        ),
        b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + GOOD.encode(),
    ],
    ids=lambda data: repr(data)[:40],
)
@pytest.mark.filterwarnings("error")
def test_what_is_no_npy_of_integers_is_refused(data: Any) -> None:
    refused(lambda: from_npy(data, source=SOURCE, most=MOST))


# base64 and nested lists


def nested(depth: int) -> list[Any]:
    deep: list[Any] = []
    for _ in range(depth):
        deep = [deep]
    return deep


@pytest.mark.parametrize(
    "value",
    [
        *(None, "AAAA", {"data": [[[1]]]}, [1], [[[]]], [[[[1]]]], [[[1.0]]], [[[True]]], [[["1"]]]),
        *([[[2**63]]], [[[10**400]]], [[[np.int64(1)]]], [[[1, 2]], [[1]]], [[[1]], []], [[[1]], "a"]),
        *([np.ones((1, 1), int)], nested(100_000), [[nested(5000)]]),
    ],
    ids=lambda value: str(type(value)),
)
def test_what_is_no_array_in_lists_is_refused(value: Any) -> None:
    refused(lambda: from_lists(value, source=SOURCE, most=SHAPE_MOST))
