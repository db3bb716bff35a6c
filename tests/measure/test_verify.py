"""Labels measured again: what agrees, what does not, and what cannot be compared."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.refusals import names, refused
from neuroshard.core.cost import Costs
from neuroshard.core.errors import InvalidInput, UsageError
from neuroshard.files.costs import CostWriter, read_costs, read_manifest
from neuroshard.measure import verify
from neuroshard.measure.backends import MeasureSettings
from neuroshard.measure.run import run


@pytest.fixture
def costs(cases_folder: Path, tmp_path: Path) -> Path:
    run(cases_folder, tmp_path / "costs", "synthetic", MeasureSettings(batch_size=512))
    return tmp_path / "costs"


def changed(costs: Path, to: Path, **of_bench: object) -> tuple[Costs, CostWriter]:
    """The costs, and a writer of others on a bench that is changed."""
    was = read_costs(costs)
    return was, CostWriter(to, was.bench.model_copy(update=of_bench), read_manifest(costs).tables)


def test_labels_that_repeat_agree(costs: Path) -> None:
    verified = verify.run(costs, count=30)
    assert verified.cases == 30
    assert verified.agrees
    assert verified == verify.run(costs, count=30)
    assert 0 < len(verified.differences["all-to-all, forward"]) < 30
    assert all(what in str(verified) for what, values in verified.differences.items() if values)


def test_labels_that_are_off_are_found_out(costs: Path, tmp_path: Path) -> None:
    was, writer = changed(costs, tmp_path / "off")
    with writer:
        for case, cost in was.compute:
            slower = {"forward_ms": (cost.forward_ms or 0) * 1.1, "backward_ms": (cost.backward_ms or 0) * 1.1}
            writer.add(case, cost.model_copy(update=slower))
    verified = verify.run(tmp_path / "off", count=30)
    assert not verified.agrees
    assert names(str(verified), "5%")


def test_disturbed_labels_do_not_count_if_enough_are_calm(costs: Path, tmp_path: Path) -> None:
    was, writer = changed(costs, tmp_path / "some")
    with writer:
        for place, (case, cost) in enumerate(was.compute):
            worse = {"forward_ms": (cost.forward_ms or 0) * 3, "disturbed": True} if place % 2 else {}
            writer.add(case, cost.model_copy(update=worse))
    verified = verify.run(tmp_path / "some", count=30)
    assert verified.agrees
    assert max(verified.differences["compute"]) > 0.2 > max(verified.differences["compute, undisturbed"])


def test_the_label_of_several_rounds_is_their_mean(costs: Path, tmp_path: Path) -> None:
    was, writer = changed(costs, tmp_path / "rounds")
    with writer:
        for case, cost in was.compute:
            for place, off in enumerate((1.4, 0.9, 0.7) if cost.round == 0 else ()):
                times = {"forward_ms": (cost.forward_ms or 0) * off, "backward_ms": (cost.backward_ms or 0) * off}
                writer.add(case, cost.model_copy(update={**times, "round": place}))
    assert verify.run(tmp_path / "rounds", count=30).agrees


def test_other_hardware_is_refused_and_another_version_is_noted(costs: Path, tmp_path: Path) -> None:
    was, writer = changed(costs, tmp_path / "other", versions={"neuroshard": "0.0.1"})
    with writer:
        for case, cost in was.compute:
            writer.add(case, cost)
    (note,) = verify.run(tmp_path / "other", count=3).notes
    assert all(names(note, fact) for fact in ("versions.neuroshard", "0.0.1"))

    hardware = was.bench.hardware.model_copy(update={"name": "formula of a toaster"})
    was, writer = changed(costs, tmp_path / "foreign", hardware=hardware)
    with writer:
        for case, cost in was.compute:
            writer.add(case, cost)
    with refused(InvalidInput, "name", "formula of a toaster", "formula of an H100"):
        verify.run(tmp_path / "foreign", count=3)


def test_what_a_container_hides_does_not_make_it_other_hardware(costs: Path, tmp_path: Path) -> None:
    was = read_costs(costs)
    hardware = was.bench.hardware.model_copy(update={"machine": "a2-highgpu-1g", "sharing": "time-slicing"})
    _, writer = changed(costs, tmp_path / "named", hardware=hardware)
    with writer:
        for case, cost in was.compute:
            writer.add(case, cost)
    assert verify.run(tmp_path / "named", count=3).cases == 3


def test_nothing_to_verify_is_an_error(costs: Path, tmp_path: Path) -> None:
    _, writer = changed(costs, tmp_path / "empty")
    with writer:
        pass
    with refused(InvalidInput, tmp_path / "empty"):
        verify.run(tmp_path / "empty", count=3)
    with refused(UsageError, 1, 0):
        verify.run(costs, count=0)


def test_the_command_line_verifies_and_says_what_it_needs(
    neuroshard: Callable[..., "subprocess.CompletedProcess[str]"], costs: Path
) -> None:
    done = neuroshard("measure", "--verify", costs, "-n", 20)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 cases measured again" in done.stdout
    for more, message in (
        (["cases", "-o", "again", "--backend", "cpu"], "leave out --backend, -o, CASES"),
        (["--batch-size", "65536"], "leave out --batch-size"),
        (["--share", "1/2"], "leave out --share"),
    ):
        both = neuroshard("measure", *more, "--verify", costs)
        assert (both.returncode, both.stderr.count("\n")) == (2, 1)
        assert both.stderr.endswith(f"{message}\n")
    bare = neuroshard("measure")
    assert (bare.returncode, bare.stderr.count("\n")) == (2, 1)
    assert "measure needs a folder of cases, --backend and -o" in bare.stderr
