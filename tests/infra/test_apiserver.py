"""`make apiserver-test` is too slow for here: what it says where it cannot run, and that its build script is one."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECK = ROOT / "tests" / "apiserver" / "check.py"


def test_where_tools_are_missing_it_says_which_and_is_no_failure(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, CHECK, "--server", sys.executable],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == (
        "skipped: not installed: etcd-server, kubectl, openssl (apt-get install etcd-server kubectl openssl)\n"
    )


def test_the_build_script_parses() -> None:
    script = CHECK.with_name("build.sh")
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script]).returncode == 0
