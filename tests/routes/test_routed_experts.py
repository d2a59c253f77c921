"""RoutedExperts: what goes in, what comes out, and every way of being wrong."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from npu_replay import RoutedExperts
from npu_replay.errors import InvalidRoutes

EXPERTS = 8
TORCH_INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
NUMPY_INTEGERS = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", ">i4"]


def ids(tokens: int = 6, layers: int = 2, topk: int = 2, experts: int = EXPERTS) -> torch.Tensor:
    """Random ids, no expert twice in a row."""
    scores = torch.rand(tokens, layers, experts, generator=torch.Generator().manual_seed(tokens + layers))
    return scores.topk(topk).indices


def routes(**changes: Any) -> RoutedExperts:
    return RoutedExperts(**({"ids": ids(), "layers": (1, 4), "num_experts": EXPERTS} | changes))


def refused(**changes: Any) -> InvalidRoutes:
    with pytest.raises(InvalidRoutes) as caught:
        routes(**changes)
    assert str(caught.value).startswith("[npu_replay] ")
    return caught.value


# What goes in


@pytest.mark.parametrize("dtype", [*TORCH_INTEGERS, *NUMPY_INTEGERS], ids=str)
def test_integers_of_any_dtype_are_taken(dtype: Any) -> None:
    for tokens in (6, 0):
        expert_ids = ids(tokens)
        expert_ids = (
            expert_ids.to(dtype) if isinstance(dtype, torch.dtype) else expert_ids.numpy().astype(dtype)
        )
        built = routes(ids=expert_ids)
        assert built.ids.dtype == torch.uint8
        assert torch.equal(built.ids.long(), ids(tokens))


def test_ids_that_need_a_gradient_history_or_inference_mode_are_taken() -> None:
    with torch.inference_mode():
        made = ids()
    built = routes(ids=made)
    assert not built.ids.is_inference()
    (torch.rand(8, requires_grad=True)[built.ids.long()]).sum().backward()


# What comes out


@pytest.mark.parametrize("last", [True, False], ids=["all recorded", "one row not recorded"])
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_what_the_caller_does_to_his_arrays_later_does_not_show_n9(kind: str, last: bool) -> None:
    expert_ids = ids().to(torch.uint8)
    recorded = torch.tensor([True] * 5 + [last])
    if kind == "torch":
        built = routes(ids=expert_ids, recorded=recorded)
    else:
        built = routes(ids=expert_ids.numpy(), recorded=recorded.numpy())
    before = built.ids.clone()
    expert_ids.fill_(7)
    recorded.fill_(False)
    assert torch.equal(built.ids, before)
    assert built.recorded.tolist() == [True] * 5 + [last]


# Rows without a route


@pytest.mark.parametrize("junk", [0, -1, 99, 255])
def test_rows_that_are_not_recorded_are_stored_as_zero_and_never_looked_at_t1_t24_t27(junk: int) -> None:
    expert_ids = ids()
    expert_ids[2] = junk
    recorded = torch.ones(6, dtype=torch.bool)
    recorded[2] = False
    built = routes(ids=expert_ids, recorded=recorded)
    assert built.ids[2].tolist() == [[0, 0], [0, 0]]
    assert built == routes(ids=ids(), recorded=recorded)
    assert "1 rows without a route" in repr(built)
    assert not routes(ids=torch.full((6, 2, 2), junk), recorded=torch.zeros(6).bool()).recorded.any()


# take, concat and equality


@pytest.mark.parametrize("make", [list, np.array, torch.tensor, lambda rows: torch.tensor(rows).int()])
def test_take_accepts_rows_a_mask_and_nothing(make: Any) -> None:
    built = routes(recorded=torch.tensor([True] * 5 + [False]))
    taken = built.take(make([1, -1, 4, 5]))  # a negative one makes a row without a route
    assert taken.recorded.tolist() == [True, False, True, False]
    assert taken.ids[1].tolist() == [[0, 0], [0, 0]]
    assert torch.equal(taken.ids[[0, 2]], built.ids[[1, 4]])
    assert len(built.take(make([]))) == 0
    if make in (list, np.array, torch.tensor):
        mask = [True, False, False, True, False, True]
        assert torch.equal(built.take(make(mask)).ids, built.ids[[0, 3, 5]])
        assert len(built.take(make([False] * 6))) == 0


def test_take_returns_rows_in_the_order_asked_in_memory_of_their_own() -> None:
    built = routes(weight_version=4, fingerprint=9)
    taken = built.take([3, 0, 3])
    assert torch.equal(taken.ids, built.ids[[3, 0, 3]])
    assert taken.recorded.all()
    assert (taken.layers, taken.weight_version) == (built.layers, 4)
    assert taken.fingerprint is None  # another sequence
    for other in (built.take(range(6)), RoutedExperts.concat([built])):
        other.ids.fill_(3)
        assert torch.equal(built.ids, routes().ids)
    assert len(routes(ids=ids(tokens=0)).take([-1, -1])) == 2


def test_concat_puts_rows_one_after_the_other_and_keeps_a_weight_version_that_all_have() -> None:
    first = routes()
    two = routes(recorded=torch.tensor([True, False] * 3))
    both = RoutedExperts.concat([first, two])
    assert torch.equal(both.ids, torch.cat([first.ids, two.ids]))
    assert both.recorded.tolist() == [True] * 6 + [True, False] * 3
    assert RoutedExperts.concat([routes(weight_version=1), routes(weight_version=1)]).weight_version == 1
    assert RoutedExperts.concat([routes(weight_version=1), routes(weight_version=2)]).weight_version is None
    assert RoutedExperts.concat([routes(fingerprint=1), routes(fingerprint=1)]).fingerprint is None


@pytest.mark.parametrize(
    "change",
    [
        {"ids": ids().flip(0)},
        {"layers": (0, 4)},
        {"num_experts": 16},
        {"recorded": torch.tensor([True] * 5 + [False])},
        {"fingerprint": 1},
        {"weight_version": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_equal_means_everything_is_equal(change: dict[str, Any]) -> None:
    assert routes() == routes()
    assert routes() != routes(**change)
    assert routes() != "routes"


# What is refused


OTHERS: list[tuple[dict[str, Any], str]] = [
    # arguments, and what is said of them: ids
    ({"ids": torch.tensor([[[300, 1]]]), "layers": [0], "num_experts": 256}, "got 300"),  # T19
    (
        {"ids": torch.full((2, 2, 2), 0.5)},
        r"array of integers.*got Tensor of torch.float32, \[2, 2, 2\]\. .*astype\(int\)",
    ),
    ({"ids": torch.ones(2, 2, 2, dtype=torch.bool)}, "array of integers.*got Tensor of torch.bool"),
    ({"ids": ids().tolist()}, "array of integers.*got list"),
    ({"ids": ids().reshape(24)}, r"Expected \[tokens, layers, topk\], got \[24\]"),  # T34
    ({"ids": torch.zeros((6, 2, 0), dtype=torch.int64)}, "bad top-k"),
    ({"ids": torch.zeros((6, 2, 9), dtype=torch.int64)}, "bad top-k"),
    # labels: T2, T3
    ({"layers": (1, 2, 3)}, r"3, for layers \(1, 2, 3\), got 2"),
    *(({"layers": bad}, re.escape(f"got {bad}")) for bad in ((4, 1), (1, 1), (-1, 2), (1, 4096))),
    # the mask
    *(
        ({"recorded": bad}, r"Expected bool, shape \(6,\)")
        for bad in (torch.ones(5).bool(), torch.ones(6, 2).bool(), np.ones(6))
    ),
    # numbers
    *(({"num_experts": bad}, "number of experts") for bad in (0, -1, 32_768)),
    *(({"fingerprint": bad}, f"got .*{re.escape(str(bad))}") for bad in (-1, 2**64)),
]


@pytest.mark.parametrize(("changes", "words"), OTHERS, ids=str)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], words: str) -> None:
    assert re.search(words, str(refused(**changes)))


@pytest.mark.parametrize(
    ("make", "of", "words"),
    [
        *((routes().take, bad, "Expected") for bad in ([6], [0, 1, 100], [[0, 1]], torch.zeros(5).bool())),
        *((routes().take, bad, "integer") for bad in (torch.tensor([0.5, 1.0]), np.array([1.0]), [1.5])),
        (RoutedExperts.concat, [], "at least one"),
        *(
            (RoutedExperts.concat, [routes(), other], f"part 1 of concat.* other {what}")
            for what, other in (
                ("layers", routes(layers=(0, 4))),
                ("num_experts", routes(num_experts=16)),
                ("topk", routes(ids=ids(topk=3))),
            )
        ),
    ],
    ids=str,
)
def test_rows_that_are_not_there_and_parts_of_another_model_are_refused(
    make: Any, of: Any, words: str
) -> None:
    with pytest.raises(InvalidRoutes, match=words):
        make(of)


@pytest.mark.parametrize(("dtype", "experts"), [(torch.uint8, 257), (torch.int8, 129)])
def test_ids_of_a_dtype_that_cant_hold_them_all_are_refused_t19(dtype: torch.dtype, experts: int) -> None:
    """Those above were cut off on the way, and what is left looks like any other id."""
    expert_ids = torch.tensor([[[0, 1]], [[2, 3]]]).to(dtype)
    assert len(RoutedExperts(ids=expert_ids, layers=[0], num_experts=experts - 1)) == 2
    with pytest.raises(InvalidRoutes, match=r"the ids' dtype can't hold every expert.*narrowed on the way"):
        RoutedExperts(ids=expert_ids, layers=[0], num_experts=experts)


@pytest.mark.parametrize("bad", [-1, EXPERTS, 70_000])
def test_an_id_out_of_range_is_refused_with_its_layer_and_row(bad: int) -> None:
    expert_ids = ids()
    expert_ids[3, 1, 0] = bad
    error = refused(ids=expert_ids)
    assert (error.where, error.expected, error.got) == ("layer 4", "ids from 0 to 7", bad)
    assert re.search(r"row 3 \(1 such token-layers", error.problem)
    assert "recorded=" in error.cause


@pytest.mark.parametrize("topk", [2, 16, 17])
def test_an_expert_twice_in_a_row_is_refused_t1(topk: int) -> None:
    expert_ids = ids(topk=topk, experts=20)
    expert_ids[4, 0, topk - 1] = expert_ids[4, 0, 0]
    expert_ids[5, 0, topk - 1] = expert_ids[5, 0, 0]
    error = refused(ids=expert_ids, num_experts=20)
    assert error.where == "layer 1"
    assert "2 token-layers" in error.problem
    assert "row 4" in error.problem
    assert error.got == expert_ids[4, 0].tolist()
    assert "recorded=" in error.cause


# From outside


@pytest.mark.parametrize(("tokens", "known", "fine"), [(64, 64, False), (65, 64, False), (63, 63, True)])
def test_a_constant_layer_of_64_recorded_rows_is_refused_from_outside_only_t32(
    tokens: int, known: int, fine: bool
) -> None:
    """Rows that are not recorded neither count nor hide it."""
    expert_ids = ids(tokens)
    expert_ids[:known, 1] = torch.tensor([0, 1])
    built = routes(
        ids=expert_ids, recorded=torch.arange(tokens) < known
    )  # a record of equal tokens looks like that
    if fine:
        assert RoutedExperts.from_bytes(built.to_bytes()) == built
        return
    with pytest.raises(
        InvalidRoutes, match=r"layer 4: all 64 recorded rows are the same.*\[0, 1\] in every row"
    ):
        RoutedExperts.from_bytes(built.to_bytes())


def test_flags_of_numpy_are_written_as_any_others() -> None:
    back = RoutedExperts.from_bytes(
        routes(constant_layers_ok=np.True_, from_engine=np.False_).to_bytes(),
    )
    assert (back.constant_layers_ok, back.from_engine) == (True, False)
