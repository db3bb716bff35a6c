"""Every command that shows what others wrote: no control character, no forged line, no user info, in whatever is printed."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers.costs import random_model
from helpers.plans import NOW, TABLES, make_plan
from neuroshard.cli import app
from neuroshard.core.errors import Refused
from neuroshard.core.plan import Baseline, Plan
from neuroshard.costmodel.bundle import save_cost_model
from neuroshard.deploy.bundles import PublishRule, publish_model
from neuroshard.deploy.gate import Gate
from neuroshard.deploy.run import deploy
from neuroshard.files.plan import write_plan
from neuroshard.files.tables import write_tables
from neuroshard.store.folder import FolderStore

EVIL = "x\x1b]0;title\x07\x9b2J\u202e\u2066\u200b\ufeff\r\nFORGED line http://admin:s3cretpw@host/?token=s3cretpw "
NAME = "\u202e\u200b http://admin:s3cretpw@host "  # of a table; other characters are refused there
HIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


def hostile_plan(note: str) -> Plan:
    tables = tuple(table.model_copy(update={"name": f"{table.name}{NAME}"}) for table in TABLES)
    plan = make_plan(note, tables=tables)
    by = {
        "neuroshard_version": EVIL,
        "algorithm": EVIL,
        "cost_model": EVIL,
        "cost_model_backend": "analytic",
        "cost_model_device": EVIL,
        "notes": (EVIL, note),
    }
    update = {
        "provenance": plan.provenance.model_copy(update=by),
        "baselines": (Baseline(algorithm=EVIL, predicted_ms=(2.0, 2.0)), Baseline(algorithm=EVIL, error=EVIL)),
        "bound_assumptions": (EVIL,),
    }
    return plan.model_copy(update=update)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    store = FolderStore(folder / "store")
    old, new = hostile_plan("old"), hostile_plan("new")
    write_plan(folder / "old.json", old)
    moved = tuple(shard.model_copy(update={"device": 1 - shard.device}) for shard in new.shards)
    write_plan(folder / "new.json", new.model_copy(update={"shards": moved}))
    write_tables(folder / "tables.json", old.task.tables)
    deploy(old, store, "m", now=NOW)
    deploy(new, store, "m", now=NOW, gate=Gate(force=True))
    with pytest.raises(Refused):
        deploy(hostile_plan("refused"), store, "m", now=NOW, gate=Gate(max_error=0.1))
    model = random_model(2)
    bench = model.manifest.bench
    named = bench.model_copy(update={"hardware": bench.hardware.model_copy(update={"name": EVIL})})
    print_ = named.hardware.fingerprint
    model = replace(model, manifest=model.manifest.model_copy(update={"bench": named, "hardware_fingerprint": print_}))
    save_cost_model(folder / "model", model)
    publish_model(folder / "model", store, now=NOW, asked=PublishRule(force=True))
    (folder / "broken.json").write_text(json.dumps({EVIL: EVIL}))
    (folder / "constraints.json").write_text(json.dumps({"pins": {NAME: [7]}, EVIL: 1}))
    return folder


COMMANDS = [
    ["show", "old.json"],
    ["show", "old.json", "--json"],
    ["diff", "old.json", "new.json"],
    ["diff", "old.json", "new.json", "--json"],
    ["report", "old.json", "-o", "report.html", "--live", "new.json"],
    ["releases", "--store", "store", "--name", "m"],
    ["releases", "--store", "store", "--name", "m", "--json"],
    ["releases", "--store", "store", "--name", "m", "--refused"],
    ["releases", "--store", "store", "--name", "m", "--refused", "--json"],
    ["models", "--store", "store"],
    ["models", "--store", "store", "--json"],
    ["publish-model", "model", "--store", "store"],
    ["publish-model", "model", "--store", "store", "--force"],
    ["deploy", "new.json", "--store", "store", "--name", "m"],
    ["deploy", "new.json", "--store", "store", "--name", "m", "--tables", "tables.json", "--max-error", "0.1"],
    ["rollback", "--store", "store", "--name", "m"],
    ["gc", "--store", "store", "--name", "m"],
    ["tables", "--from", "tables.json", "--check"],
    ["fleet", "--against", "store"],
    ["search", "tables.json", "--model", "model", "--devices", "2", "--memory", "1GiB", "-o", "searched.json"],
    ["search", "tables.json", "--model", "model", "--devices", "2", "--memory", "1KiB", "-o", "searched.json"],
    ["search", "tables.json", "--constraints", "constraints.json", "--model", "model", "--devices", "2", "--memory",
     "1GiB", "-o", "searched.json"],
    ["evaluate", "old.json", "--backend", "synthetic"],
    ["show", "broken.json"],
    ["show", EVIL],
    ["releases", "--store", f"s3://{EVIL}", "--name", "m"],
    ["releases", "--store", "http://admin:s3cretpw@host", "--name", "m"],
    ["releases", "--store", "store", "--name", EVIL],
    ["promote", EVIL, "--store", "store", "--name", "m"],
    ["submit", "--patience", "0", "--endpoint", "http://admin:s3cretpw@127.0.0.1:9", "--metrics", "http://admin:s3cretpw@127.0.0.1:9"],
    ["schedule", "--endpoint", "http://admin:s3cretpw@127.0.0.1:9", "--cron", "0 2 * * *"],
]  # fmt: skip


def printed(folder: Path, arguments: list[str]) -> tuple[Any, str]:
    """What the command prints, also by `main`, which is where errors become text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = CliRunner().invoke(app, arguments)
    said = done.output + done.stderr
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        said += f"error: {done.exception}"
    return done, said


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", COMMANDS, ids=lambda words: " ".join(words).encode("unicode_escape").decode()[:60]
)
def test_nothing_foreign_is_printed_raw(folder, arguments):
    done, said = printed(folder, arguments)

    assert said.strip()
    assert HIDDEN.findall(said) == []
    assert "s3cretpw" not in said
    assert [line for line in said.splitlines() if line.startswith("FORGED")] == []
    if "--json" in arguments:
        assert json.loads(done.stdout)


@pytest.mark.parametrize("endpoint", ["admin:s3cretpw@127.0.0.1:9", "http://admin:s3cretpw@127.0.0.1:9"])
def test_warnings_of_libraries_and_errors_are_clean(neuroshard, tmp_path, endpoint):
    done = neuroshard("submit", "--patience", "0", "--endpoint", endpoint, cwd=tmp_path)

    assert done.returncode == 1
    assert "error: " in done.stderr
    assert "***@127.0.0.1:9" in done.stderr
    assert "s3cretpw" not in done.stderr + done.stdout


def test_the_report_is_clean_too(folder):
    done, said = printed(folder, ["report", "old.json", "-o", "report.html", "--live", "new.json"])
    assert done.exit_code == 0, said
    page = (folder / "report.html").read_text()
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert block is not None

    assert "FORGED" in page
    for text in (
        re.sub(r"<script.*?</script>", "", page, flags=re.S),
        json.dumps(json.loads(block[1]), ensure_ascii=False),
    ):
        assert HIDDEN.findall(text) == []
        assert "s3cretpw" not in text


def test_the_events_and_metrics_of_a_run_are_clean(tmp_path, capsys, monkeypatch):
    from neuroshard.submit import outcome as reporting

    sent: list[dict[str, Any]] = []
    for name in ("NAME", "NAMESPACE", "UID"):
        monkeypatch.setenv(f"POD_{name}", "x")

    class Api:
        def __init__(self, _: object) -> None: ...

        def create_namespaced_event(self, _: str, event: dict[str, Any], **__: Any) -> None:
            sent.append(event)

    from contextlib import nullcontext

    import kubernetes.client

    monkeypatch.setattr(reporting, "kubernetes_api", lambda *_: nullcontext())
    monkeypatch.setattr(kubernetes.client, "CoreV1Api", Api)
    outcome = reporting.RunOutcome(1.0, 2.0, False, EVIL)
    reporting.report_outcome(outcome, "http://admin:s3cretpw@127.0.0.1:9", event=True)

    for text in (sent[0]["message"], capsys.readouterr().err):
        assert text
        assert HIDDEN.findall(text) == []
        assert "s3cretpw" not in text
