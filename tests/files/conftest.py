"""A full disk, and small tables."""

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from neuroshard.core.table import Table


@pytest.fixture
def full_disk() -> Callable[[], AbstractContextManager[None]]:
    """`with full_disk():` no file can grow beyond 64 bytes, as on a disk without room (EFBIG in place of ENOSPC)."""

    @contextmanager
    def limit() -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                sys, "dont_write_bytecode", True
            )  # Python would keep half of what it compiles, and fail ever after
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit


@pytest.fixture
def tables() -> tuple[Table, ...]:
    """Four tables of different size, bytes, bins and pooling."""
    return (
        Table(name="user", rows=1000, dim=64, pooling_factor=2.5, pooling="mean", weighted=True),
        Table(name="item", rows=40_000, dim=32, pooling_factor=1.0, element_bytes=2),
        Table(name='ünïcode, "quoted"', rows=7, dim=4, pooling_factor=0.25, optimizer_bytes_per_element=8),
        Table(name="never", rows=2**40, dim=2048, pooling_factor=0.0),
    )
