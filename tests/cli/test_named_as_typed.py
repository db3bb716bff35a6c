"""A message of `neuroshard search` names what a user types."""

import pytest

from neuroshard.cli.options import named_as_typed
from neuroshard.core.errors import Infeasible, InvalidInput, NeuroshardError


@pytest.mark.parametrize(
    ("said", "typed"),
    [
        ("host_memory: 'x' is not an amount", "--host-memory: 'x' is not an amount"),
        ("the task: host_memory_bytes: must be smaller", "--host-memory: must be smaller"),
        ("the task: device_memory_bytes[1]: must be smaller", "--memory: must be smaller"),
        ("previous: not a plan", "--from: not a plan"),
        ("rounds must be at least 0", "--rounds must be at least 0"),
        ("devices have 3 GiB", "devices have 3 GiB"),
        ("tables[3].dim: must be a multiple of 4", "tables[3].dim: must be a multiple of 4"),
    ],
)
def test_an_error_that_begins_with_an_option_has_its_flag(said: str, typed: str) -> None:
    assert str(raised(InvalidInput(said))) == typed


def test_an_error_keeps_its_kind_and_what_it_knows() -> None:
    error = raised(Infeasible("memory: too little", proven=True))
    assert isinstance(error, Infeasible)
    assert error.proven


def raised(error: NeuroshardError) -> NeuroshardError:
    """As it is raised where options are named as typed."""
    try:
        with named_as_typed():
            raise error
    except NeuroshardError as same:
        return same
