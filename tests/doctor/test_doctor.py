"""The checks of this machine, of stores and of Kubeflow Pipelines."""

import json
import sys
from pathlib import Path

import pytest

from helpers import servers
from helpers.memory_store import MemoryStore
from neuroshard.core.errors import Conflict
from neuroshard.core.extras import install_command, pip
from neuroshard.doctor import machine, services
from neuroshard.doctor.checks import Check, check_lines, last_line
from neuroshard.doctor.machine import GIB, disk_check, memory_check, operator_check
from neuroshard.doctor.services import FOLDER, check_kfp, check_store


def healthy(body: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def test_a_folder_is_an_honest_store_and_keeps_no_object(tmp_path):
    assert check_store(str(tmp_path)).verdict == "ok"
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"] == []


def test_a_folder_that_was_not_there_is_not_there_afterwards(tmp_path):
    assert check_store(str(tmp_path / "new" / "store")).verdict == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_store_with_conditional_writes_is_honest_and_one_without_is_not(aws, moto, rclone):
    good = aws(moto)
    assert check_store(good).verdict == "ok"
    from neuroshard.store.open import open_store

    assert open_store(good).list(f"{FOLDER}/") == ()
    bad = check_store(aws(rclone))
    assert (bad.verdict, "ignores conditional writes" in bad.says, "single writer" in bad.mend) == ("fail", True, True)


@pytest.mark.parametrize(
    ("method", "words"), [("create", "overwrites an object that exists"), ("swap", "swaps an object that has changed")]
)
def test_a_store_that_says_yes_to_everything_is_found_out(monkeypatch, method, words):
    store = MemoryStore()
    honest = getattr(store, method)

    def obliging(key, data, *expected):
        try:
            return honest(key, data, *expected)
        except Conflict:
            return True

    monkeypatch.setattr(store, method, obliging)
    monkeypatch.setattr(services, "open_store", lambda url: store)
    check = check_store("anything")
    assert check.verdict == "fail"
    assert words in check.says


def test_a_missing_store_fails_in_one_line(tmp_path):
    check = check_store(str(Path("/proc/no/such/store")))
    assert check.verdict == "fail"
    assert "\n" not in check.says


def test_kubeflow_is_asked_only_where_an_address_is_given():
    assert check_kfp(None, "2.17.0").verdict == "ok"
    assert check_kfp(None, None).verdict == "none"
    assert install_command("pipeline") in check_kfp(None, None).mend


@pytest.mark.parametrize(
    ("answer", "verdict", "words"),
    [
        (healthy('{"multi_user":false}'), "ok", "Kubeflow Pipelines answers at"),
        (healthy('{"tag_name":"2.17.3"}'), "ok", "Kubeflow Pipelines answers at"),
        (healthy('{"tag_name":"2.5.0"}'), "warn", "of version 2.5.0, not 2.17"),
        (healthy('{"tag_name":"2.170.0"}'), "warn", "of version 2.170.0, not 2.17"),
        (healthy('{"tag_name":"2.17.0","multi_user":true}'), "warn", "of several users"),
        (healthy("[1]"), "fail", "not like Kubeflow Pipelines"),
        (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", "ok", "requires a login (401)"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "fail", "is it Kubeflow Pipelines 2?"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "fail", "not like Kubeflow Pipelines"),
        (b"SSH-2.0-OpenSSH\r\n", "fail", "cannot be reached"),
    ],
)
def test_the_check_says_what_answers_at_the_address(answer, verdict, words):
    with servers.answering(answer) as (url, _):
        check = check_kfp(url.removeprefix("http://"), "2.17.0")
    assert (check.verdict, words in check.says) == (verdict, True), check


@pytest.mark.parametrize(
    ("host", "words"), [("127.0.0.1:9", "cannot be reached"), ("ftp://x", "not an address of http")]
)
def test_an_address_where_nothing_answers_fails(host, words):
    check = check_kfp(host, "2.17.0")
    assert (check.verdict, words in check.says) == ("fail", True), check


def test_an_operator_that_dies_fails_and_a_missing_one_warns(tmp_path):
    python = tmp_path / "python"
    for script, verdict in (
        ("kill -9 $$", "fail"),
        ("echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1", "warn"),
    ):
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        assert operator_check("cpu", str(python)).verdict == verdict


def test_an_operator_that_is_missing_on_a_gpu_is_mended_by_the_cuda_build(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'fbgemm_gpu'\" >&2; exit 1\n")
    python.chmod(0o755)
    assert [operator_check(kind, str(python), has_gpu=True).mend for kind in ("cpu", "cuda")] == [
        f"{pip()} uninstall -y torch fbgemm-gpu-cpu && {install_command('cuda')}"
    ] * 2


def test_little_memory_and_disk_are_warned_of(tmp_path):
    assert [memory_check(size).verdict for size in (None, GIB, 64 * GIB)] == ["none", "warn", "ok"]
    limited = memory_check(GIB, "ulimit -d")
    assert "ulimit -d" in limited.says
    assert [disk_check(tmp_path, size).verdict for size in (GIB, 64 * GIB)] == ["warn", "ok"]


def test_lines_fit_80_columns_and_the_last_says_what_failed():
    checks = [
        Check("store", "fail", "s3://bucket " * 20, "mend it " * 20),
        Check("disk", "warn", "little"),
        Check("a", "ok", "b"),
    ]
    assert max(len(line) for check in checks for line in check_lines(check)) <= 80
    assert last_line(checks) == "failed: store; to look at: disk"
    assert last_line(checks[2:]) == "all well"


@pytest.mark.slow
def test_the_command_says_all_of_it_and_its_exit_status_whether_something_failed(neuroshard, tmp_path):
    done = neuroshard(
        "doctor", "--store", tmp_path / "store", "--kfp", "127.0.0.1:9", "--service-account", "runner", "--json",
        KUBECONFIG=str(tmp_path / "none"), KUBERNETES_SERVICE_HOST="",
    )  # fmt: skip
    found = {check["name"]: check for check in json.loads(done.stdout)}

    assert done.returncode == 1, done.stderr
    assert [found[name]["verdict"] for name in ("cpu backend", "store", "kfp", "runs")] == ["ok", "ok", "fail", "warn"]
    assert "kubeflow/runner is admitted could not be checked" in found["runs"]["says"]
    assert "agrees with torch" in found["cpu backend"]["says"]  # FBGEMM's operator really ran
    assert sys.version.split()[0] in done.stdout


def test_amds_gpus_are_planned_by_a_datasheet(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "AMD_COMPUTE", tmp_path)
    monkeypatch.setattr(machine, "operator_check", lambda kind, has_gpu: Check(kind, "ok", ""))
    assert "analytic:mi300x" in [*machine.check_backends(())][-1].mend
