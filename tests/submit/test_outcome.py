"""The outcome of a run, reported in a metrics file, to a Pushgateway and as an event of the pod; and failures to report it."""

import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.json_handler import JsonHandler
from helpers.kubeflow import KfpStub
from helpers.limits import HANGS
from helpers.loopback import HttpServer
from helpers.nodes import FakeApiServer
from helpers.refusals import refused
from neuroshard.core.errors import NeuroshardError
from neuroshard.submit.kubeflow import Server
from neuroshard.submit.outcome import RunOutcome, metrics_text, report_outcome, write_event, write_metrics
from neuroshard.submit.package import RunSettings
from neuroshard.submit.run import run
from neuroshard.submit.wait import Waiting

WELL = RunOutcome(1000.4, 2000.6, True, "run r1 succeeded")
BADLY = RunOutcome(3000.0, 4000.0, False, "run r2 ended as FAILED")


class Recorder(JsonHandler):
    """Takes whatever is posted, and answers with `status`."""

    status = 201
    posted: list[tuple[str, str]]

    def do_POST(self) -> None:  # noqa: N802 # a name that http.server looks for
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.posted.append((self.path, body))
        self.send_json(self.status, {"kind": "Status", "message": "no"})


@pytest.fixture
def recorder() -> Iterator[tuple[str, type[Recorder]]]:
    handler = type("Handler", (Recorder,), {"posted": []})
    with HttpServer(handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server.url, handler
        server.shutdown()
        thread.join()


def values(text: str) -> dict[str, str]:
    return dict(line.split() for line in text.splitlines() if not line.startswith("#"))


def test_each_metric_has_a_help_line_a_type_and_a_number() -> None:
    lines = metrics_text(WELL).splitlines()
    for help_, type_, value in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        name = value.split()[0]
        assert help_.startswith(f"# HELP {name} ")
        assert type_ == f"# TYPE {name} gauge"
        assert re.fullmatch(r"[a-z_]+ \d+", value)


def test_the_file_keeps_when_a_run_last_succeeded(tmp_path: Path) -> None:
    path = tmp_path / "neuroshard.prom"
    write_metrics(str(path), WELL)
    assert values(path.read_text()) == {
        "neuroshard_nightly_success": "1",
        "neuroshard_nightly_start_timestamp_seconds": "1000",
        "neuroshard_nightly_end_timestamp_seconds": "2001",
        "neuroshard_nightly_last_success_timestamp_seconds": "2001",
    }
    write_metrics(str(path), BADLY)
    assert values(path.read_text()) == {
        "neuroshard_nightly_success": "0",
        "neuroshard_nightly_start_timestamp_seconds": "3000",
        "neuroshard_nightly_end_timestamp_seconds": "4000",
        "neuroshard_nightly_last_success_timestamp_seconds": "2001",
    }
    assert [one.name for one in tmp_path.iterdir()] == ["neuroshard.prom"]


def test_a_pipe_is_written_to_and_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDWR)
    write_metrics(str(tmp_path / "pipe"), WELL)
    assert b"neuroshard_nightly_success 1" in os.read(end, 4096)
    os.close(end)


def test_a_pushgateway_is_posted_to_so_that_it_keeps_the_last_success(recorder: tuple[str, type[Recorder]]) -> None:
    url, handler = recorder
    write_metrics(f"{url}/", BADLY)
    [(path, body)] = handler.posted
    assert path == "/metrics/job/neuroshard"
    assert "neuroshard_nightly_last_success_timestamp_seconds" not in values(body)


@pytest.mark.parametrize(
    ("state", "success", "message"), [("SUCCEEDED", "1", "run r1 succeeded"), ("FAILED", "0", "ended as FAILED")]
)
def test_the_end_of_a_run_is_reported_everywhere(
    state: str, success: str, message: str, kfp_stub: KfpStub, tmp_path: Path, api: list[Any]
) -> None:
    kfp_stub.states = [state]
    path = tmp_path / "neuroshard.prom"
    try:
        list(run(Server(kfp_stub.url), RunSettings({}), Waiting(HANGS, 0.001, str(path), event=True)))
    except NeuroshardError:
        assert state == "FAILED"
    assert values(path.read_text())["neuroshard_nightly_success"] == success
    [(where, event)] = api
    assert where == "/api/v1/namespaces/neuroshard/events"
    assert event["involvedObject"] == {
        "apiVersion": "v1", "kind": "Pod", "name": "nightly-1", "namespace": "neuroshard", "uid": "u1",
    }  # fmt: skip
    assert (event["type"], event["reason"]) == {"1": ("Normal", "RunSucceeded"), "0": ("Warning", "RunFailed")}[success]
    assert message in event["message"]


@pytest.fixture
def api(recorder: tuple[str, type[Recorder]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A pod with a way to an API server that takes events; what it took."""
    from kubernetes.config import kube_config

    url, handler = recorder
    config = FakeApiServer([], url=url).kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(config))
    for name, value in {"NAME": "nightly-1", "NAMESPACE": "neuroshard", "UID": "u1"}.items():
        monkeypatch.setenv(f"POD_{name}", value)

    class Posted(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            return ((path, json.loads(body)) for path, body in handler.posted)

    return Posted()


def test_an_event_that_is_refused_is_one_line(recorder: tuple[str, type[Recorder]], api: list[Any]) -> None:
    recorder[1].status = 403
    with refused(NeuroshardError, 403):
        write_event(WELL)


def test_an_outcome_that_cannot_be_reported_is_a_note_and_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    report_outcome(WELL, str(tmp_path / "file" / "neuroshard.prom"), event=True)
    report_outcome(WELL, "http://127.0.0.1:9", event=False)
    notes = capsys.readouterr().err.splitlines()
    assert [note.split(":")[0] for note in notes] == ["note"] * 3
    assert "POD_NAME, POD_NAMESPACE and POD_UID" in notes[1]
    assert "http://127.0.0.1:9/metrics/job/neuroshard: cannot post the metrics" in notes[2]
