"""Arrays of somebody else's: what holds no integers is refused, and no pickle is ever run."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from npu_replay.errors import InvalidRoutes
from npu_replay.rollout.payloads import from_lists, from_npy
from npu_replay.rollout.release_rules import Fault, Source, Symptom

SOURCE = Source(
    engine="Engine",
    version="1.2",
    sample="request 3",
    field="rows",
    faults=(Fault(symptom=Symptom.UNREADABLE, cause="an old encoder"),),
)


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
            loaded = from_npy(npy(array, version), source=SOURCE)
            assert loaded.dtype == array.dtype
            assert np.array_equal(loaded, array)


GOOD = claims("(1, 1, 1)")


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\x93NUMPY\x01\x00\xff", b"PK\x03\x04" + bytes(60), b"\x80\x04K\x01."),
        *(npy(np.zeros((2, 1, 1), dtype)) for dtype in ("f4", "?", "U3", "M8[s]", "i4,i4", "O")),
        raw(GOOD, b"\x01", 9),
        npy(np.zeros((2, 1, 1), "u1")) * 2,  # as two calls of np.save leave them in one file
        *(
            raw(header, b"\x01")
            for header in (
                *("", "{", "[" * 3000, "-" * 3000 + "1", b"\xff\xfe\x00", "{}"),
                "__import__('os').mkdir('/tmp/never')",
                *(claims("(1, 1, 1)", descr) for descr in ("('<i4',)", "None", "'|u3'")),
                *(claims(shape) for shape in ("[1, 1, 1]", "(1, 1, 'a')", "(" + "9" * 5000 + ", 1, 1)")),
                GOOD.replace("False", "7"),
            )
        ),
        b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + GOOD.encode(),
    ],
    ids=lambda data: repr(data)[:40],
)
@pytest.mark.filterwarnings("error")
def test_what_is_no_npy_of_integers_is_refused(data: Any) -> None:
    with pytest.raises(InvalidRoutes, match=r"Engine 1\.2, request 3, rows: this isn't an "):
        from_npy(data, source=SOURCE)


# base64 and nested lists


def nested(depth: int) -> list[Any]:
    deep: list[Any] = []
    for _ in range(depth):
        deep = [deep]
    return deep


@pytest.mark.parametrize(
    "value",
    [
        *([1], [[[]]], [[[[1]]]], [[[1.0]]], [[[1, 2.0]]], [[[True]]], [[["1"]]], [[[None]]], [[[10**400]]]),
        *([[[1, 2]], [[1]]], [[[1]], []], [[[1]], "a"], nested(5000)),
    ],
    ids=lambda value: str(type(value)),
)
def test_what_is_no_array_in_lists_is_refused(value: Any) -> None:
    refused(lambda: from_lists(value, source=SOURCE))
