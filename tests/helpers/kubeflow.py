"""A stub of the Kubeflow Pipelines API: it answers as that does where runs and recurring runs are submitted, and no more."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any

from helpers.json_handler import JsonHandler

API = "/apis/v2beta1"
CREATED = "2026-01-01T00:00:00Z"


@dataclass
class KfpStub:
    """Not Kubeflow Pipelines: it keeps what is created, and records what it was asked.

    `states` are those of a run, each time it is asked for; the last one stays. The next answers are those in `faults` (HTTP
    statuses) while there are any. `details` is what a run tells of its tasks.
    """

    url: str = ""
    states: list[str] = field(default_factory=lambda: ["SUCCEEDED"])
    faults: list[int] = field(default_factory=list)
    details: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    recurring: list[dict[str, Any]] = field(default_factory=list)
    experiments: list[dict[str, Any]] = field(default_factory=list)
    requests: list[tuple[str, str, Any]] = field(default_factory=list)  # method, path without query, JSON body
    tokens: set[str | None] = field(default_factory=set)

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        self.requests.append((method, path, body))
        if self.faults:
            status = self.faults.pop(0)
            return status, {"error": f"fault {status}", "code": 13, "message": f"fault {status}"}
        match method, path.removeprefix(API).strip("/").split("/"):
            case "GET", ["healthz"]:
                return 200, {"multi_user": False}
            case "GET", ["experiments"]:
                return 200, {"experiments": self.experiments} if self.experiments else {}
            case "POST", ["experiments"]:
                self.experiments.append({"experiment_id": "e1", "display_name": body["display_name"]})
                return 200, self.experiments[-1]
            case "GET", ["runs"]:
                return 200, {"runs": self.runs[::-1]} if self.runs else {}
            case "POST", ["runs"]:
                self.runs.append(
                    {**body, "run_id": f"r{len(self.runs) + 1}", "state": "PENDING", "created_at": CREATED}
                )
                return 200, self.runs[-1]
            case "GET", ["runs", run_id]:
                [run] = [one for one in self.runs if one["run_id"] == run_id]
                run["state"] = self.states.pop(0) if len(self.states) > 1 else self.states[0]
                return 200, {**run, "run_details": {"task_details": self.details}}
            case "GET", ["recurringruns"]:
                return 200, {"recurringRuns": self.recurring[::-1]} if self.recurring else {}
            case "POST", ["recurringruns"]:
                known = f"j{sum(path == f'{API}/recurringruns' for way, path, _ in self.requests if way == 'POST')}"
                account = body.get("service_account") or "pipeline-runner"  # as the server fills it in
                told = {"recurring_run_id": known, "service_account": account, "created_at": CREATED}
                self.recurring.append({**body, **told})
                return 200, self.recurring[-1]
            case "DELETE", ["recurringruns", recurring_run_id]:
                self.recurring = [one for one in self.recurring if one["recurring_run_id"] != recurring_run_id]
                return 200, {}
        return 404, {"error": f"the stub knows no {method} {path}"}

    def submitted(self) -> Any:
        """The body of the only run."""
        [body] = [body for method, path, body in self.requests if (method, path) == ("POST", f"{API}/runs")]
        return body

    def changes(self) -> list[str]:
        """What was asked that changes anything."""
        return [f"{method} {path.removeprefix(API)}" for method, path, _ in self.requests if method != "GET"]


@contextmanager
def serving(stub: KfpStub) -> Iterator[KfpStub]:
    class Handler(JsonHandler):
        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            stub.tokens.add(self.headers.get("Authorization"))
            self.send_json(*stub.answer(self.command, self.path.partition("?")[0], body))

        do_GET = do_POST = do_DELETE = answer  # noqa: N815 # names that http.server looks for

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        stub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield stub
        server.shutdown()
        thread.join()
