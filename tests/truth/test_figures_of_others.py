"""The analytic models against figures that others measured. They lie beside a checkout, in ../shared/truth, or nowhere."""

import pytest

from bench import truth
from neuroshard.costmodel.analytic import SPREAD

pytestmark = pytest.mark.skipif(not truth.FIGURES.is_dir(), reason="needs the figures of others")


def test_the_operator_on_an_h100_is_within_15_percent() -> None:
    """Of these rows one constant was made: from the difference of Adam and SGD, in backward."""
    found = list(truth.operator(truth.FIGURES))
    assert len(found) == 4
    for figure in found:
        assert abs(figure.error) < 0.15, figure


def test_all_to_alls_inside_a_domain_are_within_15_percent() -> None:
    """The H100's made the share of a link. B200 and GB300 were held back."""
    found = [each for each in truth.exchanges(truth.FIGURES) if "racks" not in each.what]
    assert len([each for each in found if each.used == "no"]) >= 3
    for figure in found:
        assert abs(figure.error) < 0.15, figure


def test_no_step_of_mlperf_is_shorter_than_its_embeddings() -> None:
    """1.1 is for what a step overlaps."""
    found = list(truth.steps(truth.FIGURES))
    assert {step.system.split()[-1] for step in found} >= {"a100", "h100", "h200", "b200", "gb200", "l40s", "a40"}
    for step in found:
        assert step.embeddings_ms < 1.1 * step.step_ms, step


def test_systems_keep_their_order_and_are_within_the_spread() -> None:
    found = {figure.what: figure for figure in truth.ratios(truth.FIGURES)}
    for figure in found.values():
        assert (figure.ours > 1) == (figure.theirs > 1), figure
    for name in ("a100", "h200", "b200"):
        assert abs(found[f"{name} over h100"].error) < SPREAD


def test_a_network_between_four_and_four_h100_costs_what_it_did_and_a_domain_of_two_hosts_nothing() -> None:
    found = {figure.what.partition(",")[0]: figure for figure in truth.more_hosts(truth.FIGURES)}
    assert abs(found["8 x 1 x h100 -> 4 x 2 x h100"].error) < 0.15
    assert found["8 x 1 x b200 -> 4 x 2 x gb200"].ours == pytest.approx(1.0)
