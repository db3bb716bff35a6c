"""The analytic models against figures that others measured. They lie beside a checkout, in ../shared/truth, or nowhere."""

import pytest

from bench import truth
from neuroshard.costmodel.analytic import DATASHEETS, SPREAD

pytestmark = pytest.mark.skipif(not truth.FIGURES.is_dir(), reason="needs the figures of others")


def test_the_operator_on_an_h100_is_within_10_percent() -> None:
    """In HBM, cached, and in host memory. The two cached rows with Adam gave the rates of the bus; no other row gave any."""
    found = list(truth.operator(truth.FIGURES))
    assert len(found) == 16
    assert len([figure for figure in found if figure.used == "yes"]) == 4
    for figure in found:
        assert abs(figure.error) < 0.1, figure


def test_all_to_alls_inside_a_domain_are_within_15_percent() -> None:
    """The H100's made the share of a link. B200 and GB300 were held back."""
    found = [each for each in truth.all_to_alls(truth.FIGURES) if "racks" not in each.what]
    assert len([each for each in found if each.used == "no"]) >= 3
    for figure in found:
        assert abs(figure.error) < 0.15, figure


def test_no_step_of_mlperf_is_shorter_than_its_embeddings() -> None:
    """1.1 is for what a step overlaps."""
    found = list(truth.steps(truth.FIGURES))
    assert {step.system.split()[-1] for step in found} >= {"a100", "h100", "h200", "b200", "gb200", "l40s", "a40"}
    for step in found:
        assert step.embeddings_ms < 1.1 * step.step_ms, step


def test_systems_keep_their_order_and_are_within_20_percent_once_dense_layers_are_counted() -> None:
    """The A40 is not: its step holds more than GPU and datasheet tell. It is within what is stated for GPUs without NVLink."""
    found = {figure.what.split()[0]: figure for figure in truth.ratios(truth.FIGURES)}
    assert set(found) == {"a100", "h200", "b200", "b300", "l40", "l40s", "a40"}
    for name, figure in found.items():
        assert (figure.ours > 1) == (figure.theirs > 1), figure
        spread = DATASHEETS[name].spread or 0.0
        assert abs(figure.error) < spread, figure
        assert abs(figure.dense_error) < (spread if name == "a40" else 0.2), figure


def test_more_hosts_change_steps_in_the_direction_that_was_measured() -> None:
    found = list(truth.more_hosts(truth.FIGURES))
    assert len(found) == 5
    for figure in found:
        assert figure.with_dense is not None
        assert (figure.with_dense > 1) == (figure.theirs > 1), figure
        assert abs(figure.error) < SPREAD, figure
        assert abs(figure.dense_error) < 0.2, figure


def test_a_domain_of_two_hosts_costs_what_one_host_does() -> None:
    found = {figure.what.partition(",")[0]: figure for figure in truth.more_hosts(truth.FIGURES)}
    assert found["8 x 1 x b200 -> 4 x 2 x gb200"].ours == pytest.approx(1.0)
