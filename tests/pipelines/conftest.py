"""A stub of the Kubeflow Pipelines API, and the pipeline run once on the synthetic backend."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from helpers.json_handler import JsonHandler

ROOT = Path(__file__).parents[2]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@dataclass
class KfpStub:
    """Not Kubeflow Pipelines: it answers as that API does where a run is submitted, and records what it was asked."""

    url: str = ""
    states: list[str] = field(
        default_factory=lambda: ["SUCCEEDED"]
    )  # of the run, each time it is asked for; the last stays
    requests: list[tuple[str, str, Any]] = field(default_factory=list)  # method, path without query, JSON body
    tokens: set[str | None] = field(default_factory=set)

    def answer(self, method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        self.requests.append((method, path, body))
        match method, path:
            case "GET", "/apis/v2beta1/healthz":
                return 200, {"multi_user": False}
            case "GET", "/apis/v2beta1/experiments":
                return 200, {}
            case "POST", "/apis/v2beta1/experiments":
                return 200, {"experiment_id": "e1", "display_name": body["display_name"]}
            case "POST", "/apis/v2beta1/runs":
                created = {"experiment_id": body["experiment_id"], "created_at": "2026-01-01T00:00:00Z"}
                return 200, {"run_id": "r1", "state": "PENDING", **created}
            case "GET", "/apis/v2beta1/runs/r1":
                state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
                return 200, {"run_id": "r1", "state": state, "created_at": "2026-01-01T00:00:00Z"}
        return 404, {"error": f"the stub knows no {method} {path}"}

    def submitted(self) -> Any:
        """The body of the only run."""
        [body] = [body for method, path, body in self.requests if (method, path) == ("POST", "/apis/v2beta1/runs")]
        return body


@pytest.fixture
def kfp_stub() -> Iterator[KfpStub]:
    stub = KfpStub()

    class Handler(JsonHandler):
        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            stub.tokens.add(self.headers.get("Authorization"))
            status, answer = stub.answer(self.command, self.path.partition("?")[0], body)
            self.send_json(status, answer)

        do_GET = do_POST = answer  # noqa: N815 # names that http.server looks for

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        stub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield stub
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def run_local() -> Run:
    """`make run` with these options, on a formula and few cases, without the trainer."""
    small = ["--backend", "synthetic", "--compute-cases", "60", "--comm-cases", "40", "--steps", "0"]

    def run(out: Path, *options: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "pipelines.run_local", "--out", out, *small, *options],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run
