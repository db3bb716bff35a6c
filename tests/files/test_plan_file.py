"""plan.json, read and written."""

import pytest

from helpers.plans import make_plan
from helpers.refusals import refused
from neuroshard.core.errors import InvalidInput
from neuroshard.files.plan import read_plan, write_plan


def test_a_plan_read_back_is_the_plan_that_was_written(tmp_path):
    write_plan(tmp_path / "plan.json", make_plan())
    assert read_plan(tmp_path / "plan.json") == make_plan()
    assert (tmp_path / "plan.json").read_bytes() == make_plan().canonical_json()


@pytest.mark.parametrize(("kept", "said"), [(0, "it is empty"), (1, "cut off"), (200, "cut off"), (-1, "cut off")])
def test_a_truncated_plan_is_reported_in_one_line(tmp_path, kept, said):
    path = tmp_path / "plan.json"
    path.write_bytes(make_plan().canonical_json()[:kept])
    with refused(InvalidInput, path, said) as caught:
        read_plan(path)
    assert "\n" not in str(caught.value)
