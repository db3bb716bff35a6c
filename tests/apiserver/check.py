"""A real kube-apiserver and etcd on this machine: the rendered RBAC, and the fleet probe with and without permission.

    make apiserver-test            builds the server first (tests/apiserver/build.sh, ten minutes), or says why it cannot
    .venv/bin/python tests/apiserver/check.py --server build/apiserver/kube-apiserver --record tests/fleet/nodes-recorded.json

There are no controllers and no kubelets: Nodes are written by us, and pods never run. The server is of 2021 (1.20.2), so
CronJob and PodDisruptionBudget of today's versions are left to kubernetes-validate.
"""

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.nodes import mixed_fleet, node  # noqa: E402
from helpers.servers import free_port  # noqa: E402

TOO_NEW = ("CronJob", "PodDisruptionBudget")  # for a server of 1.20
NEEDED = {"etcd": "etcd-server", "kubectl": "kubectl", "openssl": "openssl"}  # a tool, and Debian's package of it
TO_BUILD = {"go": "golang-go", "dpkg-source": "dpkg-dev"}
REFLECT2 = Path("/usr/share/gocode/src/github.com/modern-go/reflect2")
PROBE = [sys.executable, "-m", "neuroshard", "fleet", "--kubernetes"]


class Cluster:
    """A running API server, and tokens of accounts in it."""

    def __init__(self, folder: Path, url: str, certificate: Path, admin: str) -> None:
        self.folder, self.url, self.certificate, self.admin = folder, url, certificate, admin

    def kubeconfig(self, token: str) -> Path:
        cluster = {"name": "here", "cluster": {"server": self.url, "certificate-authority": str(self.certificate)}}
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "here", "clusters": [cluster]}
        users = {"users": [{"name": "one", "user": {"token": token}}]}
        contexts = {"contexts": [{"name": "here", "context": {"cluster": "here", "user": "one"}}]}
        path = self.folder / "kubeconfig"
        path.write_text(json.dumps({**config, **users, **contexts}))
        return path

    def kubectl(self, *words: object, token: str = "", stdin: str = "") -> "subprocess.CompletedProcess[str]":
        command = ["kubectl", "--kubeconfig", self.kubeconfig(token or self.admin), *words]
        return subprocess.run([str(word) for word in command], input=stdin, capture_output=True, text=True)

    def output(self, *words: object, token: str = "", stdin: str = "") -> str:
        ended = self.kubectl(*words, token=token, stdin=stdin)
        if ended.returncode:
            sys.exit(f"error: kubectl {' '.join(map(str, words))}: {ended.stderr.strip()}")
        return ended.stdout

    def token(self, namespace: str, account: str) -> str:
        """A token as the kubelet would project it."""
        return self.output("-n", namespace, "create", "token", account).strip()

    def run(self, command: list[str], token: str, **env: str) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig(token)), **env}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--server", type=Path, help="a kube-apiserver that is there [default: one built in build/apiserver]"
    )
    parser.add_argument("--record", type=Path, help="write the server's NodeList of the tests' fleet here")
    options = parser.parse_args()
    server = options.server or ROOT / "build" / "apiserver" / "kube-apiserver"
    if missing := lacking(server):
        print(f"skipped: {missing}")
        return
    if not server.exists():
        print("building kube-apiserver 1.20.2 from Debian's source (ten minutes)", flush=True)
        subprocess.run([Path(__file__).with_name("build.sh"), server.parent], check=True)
    with (
        tempfile.TemporaryDirectory(prefix="neuroshard-apiserver-") as scratch,
        running(server, Path(scratch)) as cluster,
    ):
        check(cluster, options.record)


def lacking(server: Path) -> str:
    """Why this cannot run here, or nothing."""
    wanted = dict(NEEDED)
    if not server.exists():
        release = Path("/etc/os-release").read_text() if Path("/etc/os-release").exists() else ""
        if "VERSION_CODENAME=bookworm" not in release or not Path("/etc/apt/sources.list.d/debian.sources").exists():
            return (
                "the server is built from Debian 12's source package, and this is no Debian 12; --server takes another"
            )
        wanted |= TO_BUILD
    packages = [package for tool, package in wanted.items() if not shutil.which(tool)]
    if not server.exists() and not REFLECT2.exists():
        packages.append("golang-github-modern-go-reflect2-dev")
    if packages:
        return f"not installed: {', '.join(packages)} (apt-get install {' '.join(packages)})"
    if server.exists():
        return ""
    version = subprocess.run(["go", "version"], capture_output=True, text=True).stdout
    return "" if "go1.19" in version else f"the source wants Go 1.19, and here is {version.strip()}"


@contextmanager
def running(server: Path, folder: Path) -> Iterator[Cluster]:
    """etcd and the API server, on free ports of this machine."""
    client, peer, port = free_port(), free_port(), free_port()
    admin = secrets.token_hex(16)
    (folder / "tokens.csv").write_text(f'{admin},admin,admin,"system:masters"\n')
    subprocess.run(["openssl", "genrsa", "-out", folder / "accounts.key", "2048"], check=True, capture_output=True)
    etcd = ["etcd", "--data-dir", folder / "etcd", "--listen-client-urls", f"http://127.0.0.1:{client}"]
    etcd += ["--advertise-client-urls", f"http://127.0.0.1:{client}", "--listen-peer-urls", f"http://127.0.0.1:{peer}"]
    api = [server, "--etcd-servers", f"http://127.0.0.1:{client}", "--bind-address", "127.0.0.1", "--secure-port", port]
    api += ["--cert-dir", folder / "certs", "--token-auth-file", folder / "tokens.csv", "--authorization-mode", "RBAC"]
    api += ["--service-cluster-ip-range", "10.0.0.0/24", "--service-account-issuer", "https://kubernetes.default.svc"]
    api += [
        "--service-account-key-file",
        folder / "accounts.key",
        "--disable-admission-plugins",
        "TaintNodesByCondition",
    ]
    api += ["--service-account-signing-key-file", folder / "accounts.key"]
    processes = []
    with (folder / "log").open("w") as log:
        try:
            for command in (etcd, api):
                processes.append(subprocess.Popen([str(word) for word in command], stdout=log, stderr=log, cwd=folder))
            cluster = Cluster(folder, f"https://127.0.0.1:{port}", folder / "certs" / "apiserver.crt", admin)
            began = time.monotonic()
            while cluster.kubectl("get", "--raw", "/readyz").returncode:
                if any(process.poll() is not None for process in processes) or time.monotonic() - began > 300:
                    print(*(folder / "log").read_text().splitlines()[-15:], sep="\n", file=sys.stderr)
                    sys.exit("error: the API server did not become ready")
                time.sleep(0.2)
            version = json.loads(cluster.output("get", "--raw", "/version"))["gitVersion"]
            print(f"kube-apiserver {version} with etcd, ready after {time.monotonic() - began:.0f} s")
            yield cluster
        finally:
            for process in reversed(processes):
                process.kill()
                process.wait()


def check(cluster: Cluster, record: Path | None) -> None:
    install(cluster)
    runner, submitter = (
        cluster.token(namespace, f"neuroshard-{account}")
        for namespace, account in (("kubeflow", "runner"), ("neuroshard", "submitter"))
    )
    may(cluster, runner, "runner", [("list", "nodes", True), ("get", "nodes", True)])
    forbidden = [("patch", "nodes"), ("delete", "nodes"), ("list", "secrets"), ("create", "pods"), ("list", "pods")]
    may(cluster, runner, "runner", [(*what, False) for what in forbidden])
    events, train_jobs = "events", "trainjobs.trainer.kubeflow.org"
    may(cluster, submitter, "submitter", [("create", events, True), ("list", events, False)], "neuroshard")
    may(cluster, submitter, "submitter", [("create", events, False)], "kubeflow")
    may(
        cluster,
        runner,
        "runner",
        [("create", train_jobs, True), ("delete", train_jobs, True), ("patch", train_jobs, False)],
        "kubeflow",
    )
    results = "workflowtaskresults.argoproj.io"
    in_its_namespace = [("get", "pods", True), ("create", results, True), ("patch", results, True)]
    not_there = [
        ("create", "pods"),
        ("get", "secrets"),
        ("get", "configmaps"),
        ("get", "serviceaccounts"),
    ]  # all of them
    may(cluster, runner, "runner", [*in_its_namespace, *((*what, False) for what in not_there)], "kubeflow")
    may(cluster, submitter, "submitter", [(*what, False) for what in not_there], "kubeflow")
    may(cluster, runner, "runner", [("create", train_jobs, False)], "neuroshard")
    may(cluster, submitter, "submitter", [(*what, False) for what in (("list", "nodes"), ("get", "nodes"), *forbidden)])

    admits(cluster, cluster.admin, "admin", "neuroshard-runner", "admitted", "is admitted, says https://")
    admits(cluster, cluster.admin, "admin", "nobody", "refused", 'serviceaccount "nobody" not found')
    admits(cluster, submitter, "submitter", "neuroshard-runner", "unknown", "the account exists")
    admits(cluster, submitter, "submitter", "nobody", "unknown", 'cannot get resource "serviceaccounts"')
    cluster.output("-n", "kubeflow", "delete", "serviceaccount", "neuroshard-runner")
    admits(cluster, submitter, "submitter", "neuroshard-runner", "refused", "there is no such service account")
    pods = json.loads(cluster.output("-n", "kubeflow", "get", "pods", "-o", "json"))["items"]
    expect(pods == [], f"a dry run made {len(pods)} pods")
    install(cluster)
    runner = cluster.token("kubeflow", "neuroshard-runner")

    check_event(cluster, submitter, "submitter", 0)
    check_event(cluster, runner, "runner", 1)

    put(cluster, mixed_fleet())
    if record is not None:
        listed = json.loads(cluster.output("get", "nodes", "-o", "json"))
        record.write_text(json.dumps(listed, indent=1) + "\n")
        print(f"{record}: {len(listed['items'])} nodes as the server tells them")
    probe(cluster, runner, "runner", 6)
    refused(
        cluster, submitter, "submitter", "answered 403: nodes is forbidden", "bind the ClusterRole neuroshard-fleet"
    )
    refused(cluster, "wrong", "a wrong token", "answered 401: Unauthorized", "the token is not valid there")
    cluster.output("delete", "clusterrolebinding", "neuroshard-fleet")
    refused(cluster, runner, "runner, its binding deleted", "answered 403", "bind the ClusterRole neuroshard-fleet")
    install(cluster)

    cluster.output("delete", "nodes", "--all")
    put(cluster, [node(f"n{index:04}") for index in range(1000)])
    began = time.monotonic()
    probe(cluster, runner, "runner, 1,000 nodes", 1, 1000)
    print(f"  in {time.monotonic() - began:.1f} s, Python's start included")


def install(cluster: Cluster) -> None:
    """Apply what the prod overlay renders, and the role for TrainJobs; not kinds whose version is newer than the server."""
    rendered = subprocess.run(
        ["kubectl", "kustomize", ROOT / "manifests" / "overlays" / "prod"], check=True, capture_output=True, text=True
    ).stdout
    resources = [one for one in yaml.safe_load_all(rendered) if one["kind"] not in TOO_NEW]
    resources += yaml.safe_load_all((ROOT / "manifests" / "components" / "several-nodes" / "rbac.yaml").read_text())
    kubeflow = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kubeflow"}}  # not ours to make
    items = [kubeflow, *sorted(resources, key=lambda one: one["kind"] != "Namespace")]
    applied = cluster.output(
        "apply", "--validate=false", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    )
    print(f"applied manifests/overlays/prod and the role for TrainJobs: {len(applied.splitlines()) - 1} resources")


def may(cluster: Cluster, token: str, who: str, cases: list[tuple[str, str, bool]], namespace: str = "") -> None:
    """Hold what an account may do, in one namespace or in all of them, against what it should."""
    for verb, resource, wanted in cases:
        plural, _, group = resource.partition(".")
        asked = {"verb": verb, "resource": plural, "group": group, "namespace": namespace}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        body = json.dumps({**review, "spec": {"resourceAttributes": asked}})
        answer = json.loads(cluster.output("create", "-f", "-", "-o", "json", token=token, stdin=body))["status"]
        expect(answer["allowed"] == wanted, f"may {who} {verb} {resource} in {namespace or 'all'}? {answer}")
    answers = (f"{verb} {resource} {'yes' if wanted else 'no'}" for verb, resource, wanted in cases)
    print(f"{who} in {namespace or 'all namespaces'}: may {', '.join(answers)}")


def admits(cluster: Cluster, token: str, who: str, account: str, verdict: str, words: str) -> None:
    """What an account is answered that asks whether a run's pods are admitted under another."""
    code = (
        "import json, sys; from neuroshard.kube import admission; print(json.dumps(admission('kubeflow', sys.argv[1])))"
    )
    ended = cluster.run([sys.executable, "-c", code, account], token)
    expect(ended.returncode == 0, f"{who}: {ended.stderr.strip()}")
    found, says = json.loads(ended.stdout)
    expect((found, words in says) == (verdict, True), f"{who}: {found}: {says}")
    print(f"{who} asks for {account}: {says.replace(cluster.url, 'API')}")


def put(cluster: Cluster, nodes: list[dict[str, Any]]) -> None:
    """Create nodes with their status, which is a resource of its own."""
    from kubernetes import client, config

    api = config.new_client_from_config(str(cluster.kubeconfig(cluster.admin)))
    core = client.CoreV1Api(api)
    for one in nodes:
        core.create_node(one, _preload_content=False)
        core.patch_node_status(one["metadata"]["name"], {"status": one.get("status", {})}, _preload_content=False)


def probe(cluster: Cluster, token: str, who: str, kinds: int, nodes: int | None = None) -> None:
    """The fleet as an account sees it, which is what a recording of it says too."""
    ended = cluster.run([*PROBE, "--json"], token)
    expect(ended.returncode == 0, f"{who}: {ended.stderr.strip()}")
    found = json.loads(ended.stdout)
    expect(len(found["kinds"]) == kinds, f"{who}: found {len(found['kinds'])} kinds, not {kinds}")
    expect(nodes in (None, sum(one["nodes"] for one in found["kinds"])), f"{who}: not {nodes} nodes")
    recorded = cluster.folder / "nodes.json"
    recorded.write_text(cluster.output("get", "nodes", "-o", "json"))
    replayed = subprocess.run([*PROBE, "--json", "--nodes", recorded], capture_output=True, text=True, check=True)
    expect(json.loads(replayed.stdout)["kinds"] == found["kinds"], f"{who}: a recording tells another fleet")
    print(
        f"{who}: neuroshard fleet finds {kinds} kinds of GPUs, fleet {found['fingerprint']}; a recording says the same"
    )


def check_event(cluster: Cluster, token: str, who: str, notes: int) -> None:
    """An event of a failed run, as an account in the submitter's namespace writes it; `notes` that it could not."""
    code = (
        "from neuroshard.submit.outcome import RunOutcome, report_outcome; "
        "report_outcome(RunOutcome(0, 1e9, False, 'run r1 ended'), None, True)"
    )
    pod = {"POD_NAME": f"of-{who}", "POD_NAMESPACE": "neuroshard", "POD_UID": "u1"}
    ended = cluster.run([sys.executable, "-c", code], token, **pod)
    lines = ended.stderr.strip().splitlines()
    expect(ended.returncode == 0 and len(lines) == notes, f"{who}: {ended.stderr.strip()}")
    events = json.loads(cluster.output("-n", "neuroshard", "get", "events", "-o", "json"))["items"]
    written = [
        (one["type"], one["reason"], one["message"]) for one in events if one["involvedObject"]["name"] == f"of-{who}"
    ]
    expect(written == [("Warning", "RunFailed", "run r1 ended")] * (1 - notes), f"{who}: wrote {written}")
    print(f"{who}: {lines[0] if lines else f'wrote the event {written[0]}'}")


def refused(cluster: Cluster, token: str, who: str, *words: str) -> None:
    """The probe fails in one line that holds these words."""
    ended = cluster.run(PROBE, token)
    lines = ended.stderr.strip().splitlines()
    expect(ended.returncode == 1 and len(lines) == 1, f"{who}: exit {ended.returncode}, {lines}")
    expect(all(word in lines[0] for word in words), f"{who}: {lines[0]}")
    print(f"{who}: {lines[0].replace(cluster.url, 'API')}")


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        sys.exit(f"error: {otherwise}")


if __name__ == "__main__":
    main()
