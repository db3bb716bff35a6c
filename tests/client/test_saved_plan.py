"""Under which plan a checkpoint was trained: where people save the digest, and what is no digest."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from helpers.refusals import refused
from neuroshard.client.checkpoint import saved_plan
from neuroshard.core.errors import InvalidInput

ONE, OTHER = "1" * 64, "a" * 64


def saved(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"weight": torch.zeros(2), **state}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize(
    ("state", "plan"),
    [
        ({"plan": ONE}, ONE),
        ({"app": {"plan": ONE, "step": 3}}, ONE),
        ({"plan": ONE, "app": {"plan": ONE}}, ONE),
        ({"step": 3}, None),
        ({"config": {"plan": "basic"}}, None),  # of something else
        ({"a": {"b": {"c": {"plan": ONE}}}}, None),
    ],
)
def test_a_checkpoint_says_its_plan_beside_the_model_or_one_level_down(tmp_path, state, plan):
    assert saved_plan(saved(tmp_path, state)) == plan


def test_a_plan_may_be_in_a_folder_of_the_checkpoint(tmp_path):
    saved(tmp_path / "model", {})
    assert saved_plan(tmp_path) is None
    saved(tmp_path / "optimizer", {"plan": ONE})
    saved(tmp_path / "meta", {"app": {"plan": ONE}})
    assert saved_plan(tmp_path) == ONE


@pytest.mark.parametrize(("state", "words"), [({"plan": "basic"}, ("'plan'", "'basic'")), ({"plan": 3}, ("'plan'", 3))])
def test_what_is_no_digest_is_refused(tmp_path, state, words):
    with refused(InvalidInput, *words, "plan.digest()"):
        saved_plan(saved(tmp_path, state))


def test_a_checkpoint_beside_folders_of_the_same_keys_is_refused(tmp_path):
    saved(tmp_path, {"plan": ONE, "model": {"weight": torch.zeros(2)}})
    saved(tmp_path / "old", {"plan": OTHER})
    assert saved_plan(tmp_path) == ONE
    saved(tmp_path / "model", {"plan": OTHER})
    with refused(InvalidInput, "model/", ".metadata"):
        saved_plan(tmp_path)


def test_two_plans_and_no_checkpoint_are_refused(tmp_path):
    with refused(InvalidInput, "no checkpoint", ".metadata"):
        saved_plan(tmp_path)
    saved(tmp_path / "1000", {"plan": ONE})
    saved(tmp_path / "1100", {"plan": OTHER})
    with refused(InvalidInput, "'1000.plan'", "'1100.plan'", ONE[:12], OTHER[:12]):
        saved_plan(tmp_path)
