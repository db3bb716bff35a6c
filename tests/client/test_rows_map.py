"""Ids to rows on tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from neuroshard.client.rows.collection import CollectionByAccess, TableRows
from neuroshard.client.rows.map import Part, RowMap
from neuroshard.core.errors import InvalidInput
from neuroshard.core.parts import LIST_KERNELS, MAP_KERNELS, SPLIT_KERNELS

HOT = torch.tensor([7, 2, 11, 5])
WRONG = torch.tensor([-1, -5, 13, 14, 2**40, -(2**40)])


@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13, 16, 97])
@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 8])
def test_every_rank_has_a_row_and_no_full_block_has_more_hot_ranks_than_another_but_for_one_row(
    rows: int, blocks: int
) -> None:
    part = Part("t", first=3, rows=rows, blocks=blocks)
    ranks = torch.arange(rows) + 3
    held, block_rows = part.held_in(ranks), -(-rows // blocks)
    assert held.sort().values.tolist() == list(range(rows))
    assert part.ranks_of(held).tolist() == ranks.tolist()
    lookups = torch.bincount(held // block_rows, 1.0 / (ranks - 2))[: rows // block_rows]
    assert lookups.max() - lookups.min() <= 1 + 1e-6


@given(st.integers(1, 2**40), st.integers(1, 4096), st.data())
def test_dealing_has_an_inverse_whatever_the_size(rows: int, blocks: int, data: st.DataObject) -> None:
    part, rank = Part("t", 0, rows, blocks), torch.tensor(data.draw(st.integers(0, rows - 1)))
    assert part.ranks_of(part.held_in(rank)) == rank
    assert 0 <= part.held_in(rank) < rows


def test_listed_ids_come_first_and_others_in_their_order() -> None:
    ranks, there = RowMap("t", 13, HOT).ranks(torch.arange(13))
    assert there.all()
    assert ranks[HOT].tolist() == [0, 1, 2, 3]
    assert [int(ranks[row]) for row in (0, 1, 3, 4, 6, 8, 9, 10, 12)] == list(range(4, 13))
    assert RowMap("t", 13, HOT).ids_of(ranks).tolist() == list(range(13))


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_ids_keep_their_type(kind: torch.dtype) -> None:
    ranks, _ = RowMap("t", 13, HOT).ranks(torch.tensor([11, 0], dtype=kind))
    assert (ranks.dtype, ranks.tolist()) == (kind, [2, 4])


def test_a_sorted_order_keeps_nothing() -> None:
    order = RowMap("t", 13, None)
    assert not list(order.buffers())
    assert order.ranks(torch.arange(13))[0].tolist() == list(range(13))
    assert order.ids_of(torch.arange(13)).tolist() == list(range(13))


@pytest.mark.parametrize("hot", [HOT, None], ids=["listed", "sorted"])
def test_ids_that_the_table_lacks_stay_as_they_are(hot: torch.Tensor | None) -> None:
    ranks, there = RowMap("t", 13, hot).ranks(WRONG)
    assert ranks.tolist() == WRONG.tolist()
    assert not there.any()


def test_large_tables_are_mapped_in_64_bits() -> None:
    rows, hot = 2**33, torch.tensor([2**32 + 7, 5])
    order = RowMap("t", rows, hot)
    asked = torch.tensor([2**32 + 7, 7, 5, 0, rows - 1, rows])
    ranks, _ = order.ranks(asked)
    assert ranks.tolist() == [0, 8, 1, 2, rows - 1, rows]
    assert order.ids_of(ranks[:5]).tolist() == asked[:5].tolist()


@pytest.mark.parametrize(
    ("hot", "said"),
    [
        (torch.tensor([1, 13]), "lists id 13, and the table has 13 rows"),
        (torch.tensor([-1, 1]), "lists id -1"),
        (torch.tensor([1, 2, 1]), "lists an id twice"),
        (torch.tensor([1.0]), "torch.float32 in 1 dimensions"),
        (torch.tensor([[1]]), "torch.int64 in 2 dimensions"),
    ],
)
def test_a_list_of_another_table_is_refused(hot: torch.Tensor, said: str) -> None:
    with pytest.raises(InvalidInput, match="table 't'") as refused:
        RowMap("t", 13, hot)
    assert said in str(refused.value)


class _Kernels(TorchDispatchMode):
    """Counts operators that make a tensor, but for views."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += not any(made.alias_info for made in func._schema.returns)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("in_two", [False, True], ids=["dealt", "two parts"])
@pytest.mark.parametrize("listed", [False, True], ids=["sorted", "listed"])
def test_what_is_priced_is_what_the_wrapper_launches_for_a_feature(in_two: bool, listed: bool) -> None:
    def kernels(features: int) -> int:
        names = [f"f{number}" for number in range(features)]
        config = EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=4, feature_names=names)
        parts = (Part("hot", 0, 10, 2), Part("cold", 10, 90, 2)) if in_two else (Part("dealt", 0, 100, 2),)
        held = TableRows(parts, torch.arange(20, 30) if listed else None)
        rows = CollectionByAccess(EmbeddingBagCollection([config]), {"t": held}).rows
        batch = KeyedJaggedTensor(names, torch.arange(8).repeat(features), lengths=torch.full((4 * features,), 2))
        batch.offset_per_key()
        with _Kernels() as found:
            rows.split(batch)
        return found.count

    assert kernels(3) - kernels(2) == pytest.approx(MAP_KERNELS + LIST_KERNELS * listed + SPLIT_KERNELS * in_two, abs=2)
