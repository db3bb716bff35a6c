"""A fake of the Kubeflow Pipelines API: it answers as that does where runs and recurring runs are submitted, and no more.

The shapes of runs with tasks are recorded ones (tests/submit/recorded.json). Logs, Argo's workflows and the refusal to
terminate a run without a Workflow are as the source of KFP 2.17.0 has them, and were not recorded.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from helpers.json_handler import JsonHandler
from helpers.loopback import HttpServer

API = "/apis/v2beta1"
CREATED = "2026-01-01T00:00:00Z"
RECORDED = Path(__file__).parents[1] / "submit" / "recorded.json"


def recorded(name: str) -> dict[str, Any]:
    """A run as a real API server answered, made whole again from what is kept of it."""
    kept = json.loads(RECORDED.read_text())
    run = kept["runs"][name]
    created = datetime.fromisoformat(CREATED)

    def time(seconds: int | None) -> str:
        return "1970-01-01T00:00:00Z" if seconds is None else (created + timedelta(seconds=seconds)).isoformat()

    tasks = [
        {
            "display_name": display_name,
            **({"state": state} if state else {}),
            "start_time": time(began),
            "end_time": time(ended),
            **({"child_tasks": [{"pod_name": f"{run['workflow']}-{child}"} for child in children]} if children else {}),
        }
        for display_name, state, began, ended, children in run["tasks"]
    ]
    return {
        "state": run["state"],
        "recurring_run_id": run["recurring_run_id"],
        "pipeline_spec": {"pipeline_spec": kept["spec"]},
        "runtime_config": {"parameters": {"models": run["models"]}},
        "run_details": {"task_details": tasks},
    }


def recorded_workflow(name: str) -> dict[str, Any]:
    """What Argo kept of a recorded run."""
    return dict(json.loads(RECORDED.with_name("workflows.json").read_text())["workflows"][name])


def wrong_types(body: Any) -> list[str]:
    """What the server says of parameters that are not of their declared types: it converts none (source of KFP 2.17.0)."""
    declared = body["pipeline_spec"]["pipeline_spec"]["root"]["inputDefinitions"]["parameters"]
    given = body.get("runtime_config", {}).get("parameters", {})
    kinds = {name: declared[name]["parameterType"] for name in given}
    takes = {name: {"STRING": (str,), "BOOLEAN": (bool,)}.get(kind, (int, float)) for name, kind in kinds.items()}
    return [
        f"input parameter {name} requires type {kinds[name]}" for name in given if type(given[name]) not in takes[name]
    ]


@dataclass
class KfpStub:
    """Not Kubeflow Pipelines: it keeps what is created, and records what it was asked.

    `states` are those of a run, each time it is asked for; the last one stays. The next answers are those in `faults` (HTTP
    statuses) while there are any. `details` is what a run tells of its tasks, `shape` what else it answers, or in place of it.
    `logs` are those of pods by name, `workflow` is what Argo keeps. With `lost` the next run is made and 504 is answered.
    """

    url: str = ""
    states: list[str] = field(default_factory=lambda: ["SUCCEEDED"])
    faults: list[int] = field(default_factory=list)
    details: list[dict[str, Any]] = field(default_factory=list)
    shape: dict[str, Any] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    workflow: dict[str, Any] = field(default_factory=dict)
    lost: bool = False
    several_users: bool = False
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
        match method, path.removeprefix(f"{API}/").split("/"):
            case "GET", ["healthz"]:
                return 200, {"multi_user": self.several_users}
            case "GET", ["experiments"]:
                return 200, {"experiments": self.experiments} if self.experiments else {}
            case "POST", ["experiments"]:
                self.experiments.append({"experiment_id": "e1", "display_name": body["display_name"]})
                return 200, self.experiments[-1]
            case "GET", ["runs"]:
                return 200, {"runs": self.runs[::-1]} if self.runs else {}
            case "POST", ["runs"] if wrong_types(body):
                return 400, {"message": wrong_types(body)[0]}
            case "POST", ["runs"]:
                self.runs.append(
                    {**body, "run_id": f"r{len(self.runs) + 1}", "state": "PENDING", "created_at": CREATED}
                )
                if self.lost:
                    self.lost = False
                    return 504, {"message": "the answer was lost"}
                return 200, self.runs[-1]
            case "POST", ["runs", verb] if verb.endswith(":terminate"):
                [run] = [one for one in self.runs if one["run_id"] == verb.removesuffix(":terminate")]
                run |= {"state": "FAILED", "terminated": True}
                return 200, {}
            case "GET", ["runs", run_id]:
                [run] = [one for one in self.runs if one["run_id"] == run_id]
                run["state"] = self.states.pop(0) if len(self.states) > 1 else self.states[0]
                answer = {**run, "run_details": {"task_details": self.details}, **self.shape}
                run["state"] = answer["state"] = "FAILED" if run.get("terminated") else answer["state"]
                return 200, answer
            case "GET", ["", "apis", "v1alpha1", "runs", _, "nodes", pod, "log"]:
                refusal = {"error_message": f'Failed to read logs for run: pods "{pod}" not found'}
                return 200, self.logs.get(pod, json.dumps(refusal, separators=(",", ":")))
            case "GET", ["", "apis", "v1beta1", "runs", _]:
                return 200, {"pipeline_runtime": {"workflow_manifest": json.dumps(self.workflow)}}
            case "GET", ["recurringruns", recurring_run_id]:
                found = [one for one in self.recurring if one["recurring_run_id"] == recurring_run_id]
                return (200, found[0]) if found else (404, {"message": "there is no such recurring run"})
            case "GET", ["recurringruns"]:
                return 200, {"recurringRuns": self.recurring[::-1]} if self.recurring else {}
            case "POST", ["recurringruns"]:
                known = f"j{sum(path == f'{API}/recurringruns' for way, path, _ in self.requests if way == 'POST')}"
                account = body.get("service_account") or "pipeline-runner"  # as the server fills it in
                filled_in = {"recurring_run_id": known, "service_account": account, "created_at": CREATED}
                self.recurring.append({**body, **filled_in})
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
    """The stub at a free port."""

    class Handler(JsonHandler):
        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            stub.tokens.add(self.headers.get("Authorization"))
            status, answer = stub.answer(self.command, self.path.partition("?")[0], body)
            if isinstance(answer, str):
                self.send_text(status, answer)
            else:
                self.send_json(status, answer)

        do_GET = do_POST = do_DELETE = answer  # noqa: N815 # names that http.server looks for

    with HttpServer(Handler) as server:
        stub.url = server.url
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield stub
        server.shutdown()
        thread.join()
