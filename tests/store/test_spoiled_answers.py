"""A store that answers 500 or 503, resets, hangs, cuts off or damages: a right answer or a clear error."""

import random
from types import SimpleNamespace

import pytest
from botocore.config import Config

from helpers.faults import FAULTS
from helpers.limits import HANGS
from helpers.spoiled import spoiled_day
from neuroshard.store import s3
from neuroshard.store.open import open_store


@pytest.mark.parametrize("fault", FAULTS)
def test_a_spoiled_answer_never_makes_a_wrong_plan(aws, moto, monkeypatch, fault):
    direct = open_store(aws(moto))
    wait = 0.25 if fault == "hang" else HANGS
    quick = Config(connect_timeout=wait, read_timeout=wait, retries={"mode": "standard", "total_max_attempts": 2})
    monkeypatch.setattr(s3, "CONFIG", s3.CONFIG.merge(quick))
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda seconds: None))  # before it asks again

    def aim(endpoint: str):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        return open_store(direct.url)

    day = spoiled_day(direct, moto, fault, 0.3, 12, random.Random(0), aim)

    assert day.well > 0 or fault == "hang"  # where the server is slow, all of it hangs
