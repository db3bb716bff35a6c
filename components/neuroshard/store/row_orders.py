"""The lists of hot rows that row orders name (core/row_order.py), in a store, as files/row_orders.py has them.

<model>/rows/<sha256>.npy    written once under the digest of its bytes
"""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from neuroshard.core.release import Release
from neuroshard.core.row_order import RowOrder
from neuroshard.core.value import sha256
from neuroshard.store.protocol import Store
from neuroshard.store.releases import check_model
from neuroshard.store.track import Files, ReleaseTrack, read_artifact

if TYPE_CHECKING:
    from neuroshard.files.access import Ints


def rows_of(model: str) -> ReleaseTrack[Release]:
    """The lists of a model as artifacts, which are written, checked and kept from `gc` as plans are. None goes live."""
    return ReleaseTrack(check_model(model), Release, ("rows/{}.npy",), _bytes, "list of hot rows", "deploy")


def put_ids(store: Store, model: str, data: bytes) -> None:
    """Write a list under its digest. Raises StoreError."""
    store.create(rows_of(model).keys(sha256(data))[0], data)


def read_ids(store: Store, model: str, order: RowOrder) -> "Ints":
    """The hot ids of an order (hot_rows,), from the store. Raises NotFound, InvalidInput, StoreError."""
    from neuroshard.files.row_orders import first_ids, ids_in

    if not order.ids_digest:
        return first_ids(order)
    found = read_artifact(store, rows_of(model), order.ids_digest)
    return ids_in(found.value, order, f"{store.url}/{next(iter(found.files))}")


def list_digests(model: str, keys: Iterable[str]) -> dict[str, str]:
    """Of the keys in a store, those of this model's lists, and their digests."""
    form = re.compile(rf"{re.escape(model)}/rows/([0-9a-f]{{64}})\.npy")
    return {key: found[1] for key in keys if (found := form.fullmatch(key))}


def _bytes(files: Files, where: str) -> bytes:
    (data,) = files.values()
    return data
