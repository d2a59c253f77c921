"""RoutedExperts: what goes in, what comes out, and every way of being wrong."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from npu_replay import ReplayError, RoutedExperts
from npu_replay.errors import InvalidRoutes

EXPERTS = 8
TORCH_INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
NUMPY_INTEGERS = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", ">i4"]


def ids(tokens: int = 6, layers: int = 2, topk: int = 2, experts: int = EXPERTS) -> torch.Tensor:
    """Random ids, no expert twice in a row."""
    scores = torch.rand(tokens, layers, experts, generator=torch.Generator().manual_seed(tokens + layers))
    return scores.topk(topk).indices


def routes(**changes: Any) -> RoutedExperts:
    arguments: dict[str, Any] = {"ids": ids(), "layers": (1, 4), "num_experts": EXPERTS}
    return RoutedExperts(**(arguments | changes))


def refused(**changes: Any) -> InvalidRoutes:
    with pytest.raises(InvalidRoutes) as caught:
        routes(**changes)
    assert str(caught.value).startswith("[npu_replay] ")
    assert isinstance(caught.value, ReplayError)
    return caught.value


# What goes in


@pytest.mark.parametrize("dtype", TORCH_INTEGERS, ids=str)
def test_torch_integers_of_any_dtype_are_taken(dtype: torch.dtype) -> None:
    built = routes(ids=ids().to(dtype))
    assert built.ids.dtype == torch.uint8
    assert torch.equal(built.ids.long(), ids())


@pytest.mark.parametrize("dtype", NUMPY_INTEGERS)
def test_numpy_integers_of_any_dtype_are_taken(dtype: str) -> None:
    built = routes(ids=ids().numpy().astype(dtype))
    assert built.ids.dtype == torch.uint8
    assert torch.equal(built.ids.long(), ids())


@pytest.mark.parametrize("dtype", ["u1", "i8"])
def test_read_only_numpy_is_taken_without_a_warning_t10(dtype: str) -> None:
    array = ids().numpy().astype(dtype)
    array.flags.writeable = False
    torch.set_warn_always(True)  # else only the first time in a process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            built = routes(ids=array)
    finally:
        torch.set_warn_always(False)
    assert torch.equal(built.ids.long(), ids())


def test_numpy_that_is_a_view_is_taken() -> None:
    wide = np.zeros((6, 4, 2), dtype=np.int32)
    wide[:, ::2] = ids().numpy()
    assert torch.equal(routes(ids=wide[:, ::2]).ids.long(), ids())
    backwards = np.ascontiguousarray(ids().numpy()[::-1])[::-1]
    assert torch.equal(routes(ids=backwards).ids.long(), ids())


def test_ids_that_need_a_gradient_history_or_inference_mode_are_taken() -> None:
    with torch.inference_mode():
        made = ids()
    built = routes(ids=made)
    assert not built.ids.is_inference()
    (torch.rand(8, requires_grad=True)[built.ids.long()]).sum().backward()


@pytest.mark.parametrize(
    ("experts", "dtype"), [(2, torch.uint8), (256, torch.uint8), (257, torch.int16), (32_767, torch.int16)]
)
def test_ids_are_kept_in_the_narrowest_dtype_that_holds_them_t19(experts: int, dtype: torch.dtype) -> None:
    highest = torch.tensor([[[experts - 1, 0]]])
    built = RoutedExperts(ids=highest, layers=[0], num_experts=experts)
    assert built.ids.dtype == dtype
    assert built.ids.long().tolist() == [[[experts - 1, 0]]]


def test_an_id_over_255_is_never_folded_into_a_byte_t19() -> None:
    error = refused(ids=torch.tensor([[[300, 1]]]), layers=[0], num_experts=256)
    assert error.got == 300


# What comes out


def test_the_result_is_frozen() -> None:
    built = routes()
    with pytest.raises(dataclasses.FrozenInstanceError):
        built.ids = ids()  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        built.fingerprint = 3  # type: ignore[misc]


@pytest.mark.parametrize("last", [True, False], ids=["all recorded", "one row not recorded"])
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_what_the_caller_does_to_his_arrays_later_does_not_show_n9(kind: str, last: bool) -> None:
    given, recorded = ids().to(torch.uint8), torch.tensor([True] * 5 + [last])
    if kind == "torch":
        built = routes(ids=given, recorded=recorded)
    else:
        built = routes(ids=given.numpy(), recorded=recorded.numpy())
    before = built.ids.clone()
    given.fill_(7)
    recorded.fill_(False)
    assert torch.equal(built.ids, before)
    assert built.recorded.tolist() == [True] * 5 + [last]


def test_the_ids_are_contiguous_whatever_came_in() -> None:
    given = ids().to(torch.uint8).transpose(0, 1).contiguous().transpose(0, 1)
    assert routes(ids=given).ids.is_contiguous()


def test_sizes_and_labels_can_be_asked() -> None:
    built = routes(layers=[1, 4], fingerprint=2**64 - 1, weight_version="step 3")
    assert (len(built), built.layers, built.topk, built.num_experts) == (6, (1, 4), 2, EXPERTS)
    assert (built.fingerprint, built.weight_version) == (2**64 - 1, "step 3")
    assert torch.equal(built.layer_ids(4).long(), ids()[:, 1])
    assert repr(built) == "RoutedExperts(6 tokens, 2 layers, top-2 of 8, 0 rows without a route)"


def test_no_tokens_at_all_is_fine() -> None:
    built = routes(ids=ids(tokens=0))
    assert len(built) == 0
    assert len(built.take(torch.tensor([-1, -1]))) == 2
    assert RoutedExperts.concat([built, routes()]).ids.shape == (6, 2, 2)


# Rows without a route


@pytest.mark.parametrize("junk", [0, -1, 99, 255])
def test_rows_that_are_not_recorded_are_stored_as_zero_and_never_looked_at_t1_t24_t27(junk: int) -> None:
    given = ids()
    given[2] = junk
    recorded = torch.ones(6, dtype=torch.bool)
    recorded[2] = False
    built = routes(ids=given, recorded=recorded)
    assert built.ids[2].tolist() == [[0, 0], [0, 0]]
    assert built == routes(ids=ids(), recorded=recorded)
    assert "1 rows without a route" in repr(built)


def test_rows_that_are_not_recorded_do_not_count_as_constant_t42() -> None:
    given = torch.cat([ids(tokens=10), torch.zeros(90, 2, 2, dtype=torch.int64)])
    built = routes(ids=given, recorded=torch.arange(100) < 10)
    assert RoutedExperts.from_bytes(built.to_bytes()) == built


def test_no_row_recorded_is_fine() -> None:
    built = routes(ids=torch.full((6, 2, 2), -1), recorded=torch.zeros(6, dtype=torch.bool))
    assert not built.recorded.any()


# take, concat and equality


def test_take_returns_rows_in_the_order_asked() -> None:
    built = routes(weight_version=4, fingerprint=9)
    taken = built.take([3, 0, 3])
    assert torch.equal(taken.ids, built.ids[[3, 0, 3]])
    assert taken.recorded.all()
    assert (taken.layers, taken.weight_version) == (built.layers, 4)
    assert taken.fingerprint is None  # another sequence


@pytest.mark.parametrize("make", [list, np.array, torch.tensor, lambda rows: torch.tensor(rows).int()])
def test_take_makes_rows_without_a_route_where_the_index_is_negative(make: Any) -> None:
    built = routes()
    taken = built.take(make([1, -1, 5]))
    assert taken.recorded.tolist() == [True, False, True]
    assert taken.ids[1].tolist() == [[0, 0], [0, 0]]
    assert torch.equal(taken.ids[2], built.ids[5])


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_take_accepts_a_mask(make: Any) -> None:
    built = routes()
    mask = [True, False, False, True, False, True]
    assert torch.equal(built.take(make(mask)).ids, built.ids[[0, 3, 5]])


def test_take_keeps_rows_without_a_route_as_they_are() -> None:
    recorded = torch.tensor([True, False] * 3)
    assert routes(recorded=recorded).take([1, 2]).recorded.tolist() == [False, True]


def test_take_of_nothing_is_empty() -> None:
    assert len(routes().take([])) == 0
    assert len(routes().take(torch.zeros(6, dtype=torch.bool))) == 0


@pytest.mark.parametrize("rows", [[6], [0, 1, 100], [[0, 1]], torch.zeros(5, dtype=torch.bool)], ids=str)
def test_take_refuses_rows_that_are_not_there(rows: Any) -> None:
    with pytest.raises(InvalidRoutes, match="Expected"):
        routes().take(rows)


@pytest.mark.parametrize("rows", [torch.tensor([0.5, 1.0]), np.array([1.0]), [1.5]], ids=str)
def test_take_refuses_rows_that_are_no_integers(rows: Any) -> None:
    with pytest.raises(InvalidRoutes, match="integer"):
        routes().take(rows)


def test_take_does_not_share_memory() -> None:
    built = routes()
    taken = built.take([0, 1, 2, 3, 4, 5])
    taken.ids.fill_(3)
    assert built == routes()


def test_concat_puts_rows_one_after_the_other() -> None:
    one, two = routes(), routes(recorded=torch.tensor([True, False] * 3))
    both = RoutedExperts.concat([one, two])
    assert torch.equal(both.ids, torch.cat([one.ids, two.ids]))
    assert both.recorded.tolist() == [True] * 6 + [True, False] * 3


def test_concat_of_one_does_not_share_memory() -> None:
    built = routes()
    RoutedExperts.concat([built]).ids.fill_(3)
    assert built == routes()


def test_concat_keeps_the_weight_version_where_all_agree() -> None:
    assert RoutedExperts.concat([routes(weight_version=1), routes(weight_version=1)]).weight_version == 1
    assert RoutedExperts.concat([routes(weight_version=1), routes(weight_version=2)]).weight_version is None
    assert RoutedExperts.concat([routes(fingerprint=1), routes(fingerprint=1)]).fingerprint is None


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"layers": (0, 4)}, "layers"),
        ({"num_experts": 16}, "num_experts"),
        ({"ids": ids(topk=3)}, "topk"),
    ],
)
def test_concat_refuses_routes_of_another_model(other: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidRoutes, match=f"part 1 of concat.* other {what}"):
        RoutedExperts.concat([routes(), routes(**other)])


def test_concat_refuses_nothing() -> None:
    with pytest.raises(InvalidRoutes, match="at least one"):
        RoutedExperts.concat([])


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


@pytest.mark.parametrize(("dtype", "experts"), [(torch.uint8, 257), (torch.int8, 129)])
def test_ids_of_a_dtype_that_cant_hold_them_all_are_refused(dtype: torch.dtype, experts: int) -> None:
    """Those above were cut off on the way, and what is left looks like any other id."""
    given = torch.tensor([[[0, 1]], [[2, 3]]]).to(dtype)
    assert len(RoutedExperts(ids=given, layers=[0], num_experts=experts - 1)) == 2
    with pytest.raises(InvalidRoutes, match=r"the ids' dtype can't hold every expert.*narrowed on the way"):
        RoutedExperts(ids=given, layers=[0], num_experts=experts)


@pytest.mark.parametrize("bad", [-1, EXPERTS, 255, 70_000])
def test_an_id_out_of_range_is_refused_with_its_layer_and_row(bad: int) -> None:
    given = ids()
    given[3, 1, 0] = bad
    error = refused(ids=given)
    assert (error.where, error.got) == ("layer 4", bad)
    assert "1 such token-layers" in error.problem
    assert "row 3" in error.problem
    assert error.expected == "ids from 0 to 7"
    assert "recorded=" in error.cause


@pytest.mark.parametrize("topk", [2, 16, 17])
def test_an_expert_twice_in_a_row_is_refused_t1(topk: int) -> None:
    given = ids(topk=topk, experts=20)
    given[4, 0, topk - 1] = given[4, 0, 0]
    given[5, 0, topk - 1] = given[5, 0, 0]
    error = refused(ids=given, num_experts=20)
    assert error.where == "layer 1"
    assert "2 token-layers" in error.problem
    assert "row 4" in error.problem
    assert error.got == given[4, 0].tolist()
    assert "recorded=" in error.cause


@pytest.mark.parametrize(
    "given", [torch.rand(2, 2, 2), torch.ones(2, 2, 2, dtype=torch.bool), np.ones((2, 2, 2))]
)
def test_ids_that_are_no_integers_are_refused(given: Any) -> None:
    assert "integer" in refused(ids=given).problem


def test_ids_that_are_no_array_are_refused() -> None:
    assert refused(ids=ids().tolist()).got is list


@pytest.mark.parametrize("shape", [(24,), (6, 4), (1, 6, 2, 2)])
def test_ids_of_another_shape_are_refused_t34(shape: tuple[int, ...]) -> None:
    error = refused(ids=ids().reshape(shape))
    assert (error.expected, error.got) == ("[tokens, layers, topk]", list(shape))


def test_another_number_of_layer_labels_is_refused_t2() -> None:
    error = refused(layers=(1, 2, 3))
    assert "3 columns for layers (1, 2, 3)" in str(error)
    assert error.got == 2


@pytest.mark.parametrize("layers", [(4, 1), (1, 1), (-1, 2)])
def test_labels_must_ascend_from_zero_t3(layers: tuple[int, ...]) -> None:
    assert refused(layers=layers).got == str(layers)


@pytest.mark.parametrize("layers", [(0.5, 1.5), ("a", "b"), 3, None], ids=str)
def test_labels_that_are_no_integers_are_refused(layers: Any) -> None:
    assert "label" in refused(layers=layers).problem


@pytest.mark.parametrize(
    "recorded",
    [torch.ones(5, dtype=torch.bool), torch.ones(6), torch.ones(6, 2, dtype=torch.bool), np.ones(6)],
    ids=str,
)
def test_a_recorded_mask_of_another_shape_or_dtype_is_refused(recorded: Any) -> None:
    error = refused(recorded=recorded)
    assert error.expected == "bool, shape (6,)"


@pytest.mark.parametrize("experts", [0, -1, 32_768, 2.5, None], ids=str)
def test_a_number_of_experts_that_makes_no_sense_is_refused(experts: Any) -> None:
    assert "number of experts" in refused(num_experts=experts).problem


@pytest.mark.parametrize("shape", [(6, 2, 0), (6, 2, 9)])
def test_a_topk_that_makes_no_sense_is_refused(shape: tuple[int, ...]) -> None:
    assert refused(ids=torch.zeros(shape, dtype=torch.int64)).problem == "bad top-k"


@pytest.mark.parametrize("fingerprint", [-1, 2**64, 1.5, "abc", torch.tensor(0.5)], ids=str)
def test_a_fingerprint_that_is_none_is_refused(fingerprint: Any) -> None:
    assert refused(fingerprint=fingerprint).got == fingerprint


def test_a_weight_version_that_can_not_be_written_is_refused() -> None:
    assert "weight_version" in refused(weight_version=object()).problem


# From outside


def test_a_constant_layer_is_refused_from_outside_only_t32() -> None:
    given = ids(tokens=64)
    given[:, 1] = torch.tensor([1, 0])
    built = routes(ids=given)  # a record of equal tokens looks like that
    with pytest.raises(InvalidRoutes) as caught:
        RoutedExperts.from_bytes(built.to_bytes())
    assert caught.value.where == "layer 4"
    assert "64 recorded rows are the same" in str(caught.value)
    assert "[1, 0] in every row" in str(caught.value)


def test_rows_that_are_not_recorded_do_not_hide_a_constant_layer_t32() -> None:
    given = ids(tokens=65)
    given[:, 1] = torch.tensor([1, 3])
    built = routes(ids=given, recorded=torch.arange(65) < 64)
    with pytest.raises(InvalidRoutes, match="layer 4: all 64 recorded rows are the same"):
        RoutedExperts.from_bytes(built.to_bytes())


def test_a_constant_layer_of_few_rows_is_taken_from_outside() -> None:
    given = ids(tokens=63)
    given[:, 1] = torch.tensor([1, 0])
    built = routes(ids=given)
    assert RoutedExperts.from_bytes(built.to_bytes()) == built


def test_numbers_of_numpy_and_torch_become_plain_ones() -> None:
    built = routes(
        layers=np.array([1, 4]),
        num_experts=np.int32(EXPERTS),
        fingerprint=np.uint64(2**63),
        weight_version=torch.tensor(7),
    )
    kinds = {
        type(value) for value in (*built.layers, built.num_experts, built.fingerprint, built.weight_version)
    }
    assert kinds == {int}
    assert RoutedExperts.from_bytes(built.to_bytes()) == built
