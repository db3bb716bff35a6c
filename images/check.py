"""Build both images here, without a registry, and look whether they are what the manifests count on: `make images-check`.

Needs root, buildah and debootstrap (apt-get install buildah debootstrap). The base is a Debian made by debootstrap, which
stands in for the Dockerfiles' own by BASE_IMAGE: this proves the steps, not the real base. The CUDA build of FBGEMM is left
out of the gpu image. Takes some minutes and some gigabytes, which are cleared away at the end unless --keep is given.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
BASE = "localhost/neuroshard-base"
DEBIAN, PACKAGES = "bookworm", "python3,python3-venv,python3-pip,ca-certificates"
USER = "10001:10001"
CERTIFICATES = "/etc/ssl/certs"
# what each image has to import, and what it must not hold
IMPORTS = {
    "cpu": (
        "neuroshard.nightly.survey",
        "neuroshard.pretrain.run",
        "neuroshard.search.run",
        "neuroshard.report.run",
        "neuroshard.measure.shares.train_job",
        "neuroshard.report.run",
        "vl_convert",
        "kubernetes",
        "kfp.client",
        "neuroshard.submit.run",
        "fbgemm_gpu",
    ),
    "gpu": ("neuroshard.measure.shares.job", "neuroshard.devices", "torch", "boto3", "pynvml"),
}
COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "make", "ld", "nvcc")


class Failed(Exception):
    """An image is not what it should be; the message is one line."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="root file system to take for a base [default: made by debootstrap]")
    parser.add_argument("--keep", type=Path, help="keep the images in this folder, and build on what it holds")
    parser.add_argument("--image", choices=["cpu", "gpu"], action="append", help="only this one")
    options = parser.parse_args()
    missing = [tool for tool in ("buildah", "debootstrap") if not shutil.which(tool)]
    if missing:
        sys.exit(f"error: this needs {' and '.join(missing)}: apt-get install {' '.join(missing)}")
    try:
        with storage(options.keep) as store, tempfile.TemporaryDirectory(prefix="neuroshard-images-") as scratch:
            make_base(store, options.base, Path(scratch))
            for kind in options.image or ["cpu", "gpu"]:
                check(store, kind, Path(scratch))
    except Failed as error:
        sys.exit(f"error: {error}")


@contextmanager
def storage(keep: Path | None) -> Iterator[list[str]]:
    """Where buildah keeps images: its global options."""
    if keep is not None:
        yield ["--storage-driver", "vfs", "--root", str(keep / "images"), "--runroot", str(keep / "run")]
        return
    with tempfile.TemporaryDirectory(prefix="neuroshard-storage-") as folder:
        yield ["--storage-driver", "vfs", "--root", f"{folder}/images", "--runroot", f"{folder}/run"]


def run(*command: object) -> str:
    """What a command prints. Raises Failed with its last line."""
    ended = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=ROOT)
    if ended.returncode:
        lines = (ended.stdout + ended.stderr).strip().splitlines()
        print(*lines[-25:], sep="\n", file=sys.stderr)
        raise Failed(f"{command[0]} {command[-1]}: exit code {ended.returncode}")
    return ended.stdout


def buildah(store: list[str], verb: str, *arguments: object) -> str:
    return run("buildah", *store, verb, *arguments)


def make_base(store: list[str], rootfs: Path | None, scratch: Path) -> None:
    if BASE in buildah(store, "images", "--format", "{{.Name}}"):
        return
    if rootfs is None:
        print(f"making a base by debootstrap ({DEBIAN})", file=sys.stderr)
        rootfs = scratch / "rootfs"
        run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", DEBIAN, rootfs)
    container = buildah(store, "from", "scratch").strip()
    buildah(store, "copy", "--quiet", container, rootfs, "/")
    buildah(store, "commit", "--quiet", container, BASE)
    buildah(store, "rm", container)


def check(store: list[str], kind: str, scratch: Path) -> None:
    """Build an image and hold it against what is promised of it. Raises Failed."""
    image = f"localhost/neuroshard-{kind}"
    print(f"building {image}", file=sys.stderr)
    arguments = {"BASE_IMAGE": BASE, "VERSION": "check", "REVISION": "check"}
    if kind == "gpu":
        arguments["LEAVE_OUT"] = "fbgemm-gpu"
    else:
        arguments["TORCH"] = "cpu"  # this machine's pip finds it, or does not
    given = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    mounts = [word for mount in pip_mounts(scratch) for word in ("-v", mount)]
    buildah(
        store, "bud", "--isolation", "chroot", "--pull-never", "--format", "docker", *given, *mounts,
        "-f", ROOT / "images" / kind / "Dockerfile", "-t", image, ROOT,
    )  # fmt: skip

    config = json.loads(buildah(store, "inspect", "--type", "image", image))["Docker"]["config"]
    labels = config["Labels"]
    expect(config["User"] == USER, f"{image}: runs as {config['User']}, not {USER}")
    for label in ("version", "revision"):
        told = labels.get(f"org.opencontainers.image.{label}")
        expect(told == "check", f"{image}: label {label} is {told}")

    container = buildah(store, "from", "--pull-never", image).strip()
    try:

        def inside(*command: str) -> str:
            return buildah(store, "run", "--isolation", "chroot", "--user", USER, container, "--", *command)

        expect(inside("id", "-u").strip() == "10001", f"{image}: id -u is not 10001")
        found = inside("sh", "-c", f"for tool in {' '.join(COMPILERS)}; do command -v $tool || true; done").split()
        expect(not found, f"{image}: holds {', '.join(found)}")
        inside("python3", "-c", f"import {', '.join(IMPORTS[kind])}")
        inside("sh", "-c", "command -v mktemp && command -v sh")  # what a KFP step's command calls
        writable = inside(
            "sh",
            "-c",
            "find / -xdev -type d -writable ! -path '/proc/*' ! -path '/dev/*' ! -path '/sys/*' 2>/dev/null || true",
        ).split()
        expect(set(writable) <= {"/tmp", "/var/tmp", "/run/lock", "/dev/shm"}, f"{image}: writable: {writable[:5]}")
        print(f"{image}: steps by their real commands: {night(inside, kind)}")
    finally:
        buildah(store, "rm", container)
    size = json.loads(buildah(store, "images", "--json", image))[0]["size"]
    print(f"{image}: {size} with this base; user, labels, imports, tools and write permissions are as promised")


def night(inside: Any, kind: str, scratch: str = "/tmp") -> str:
    """Run steps of the pipeline as KFP's launcher would, by their real commands, and tell what they made in the `scratch` folder.

    The cpu image surveys; the gpu image goes on to measure, by the formula, as there is no GPU here.
    """
    spec = next(yaml.safe_load_all((ROOT / "pipelines" / "neuroshard.yaml").read_text()))
    asked = {name: one["defaultValue"] for name, one in spec["root"]["inputDefinitions"]["parameters"].items()}
    asked |= {
        "run": "check",
        "backend": "synthetic",
        "store": f"{scratch}/store",
        "compute_cases": 20,
        "collective_cases": 4,
        "budget": "30s",
    }

    def step(name: str, **more: str) -> dict[str, Any]:
        wanted = spec["components"][f"comp-{name}"]["inputDefinitions"]["parameters"]
        values = {key: value for key, value in {**asked, **more}.items() if key in wanted}
        for key, value in values.items():  # the YAML writes 2000.0 for a whole number, and KFP's launcher 2000
            values[key] = int(value) if wanted[key]["parameterType"] == "NUMBER_INTEGER" else value
        told = json.dumps({"inputs": {"parameterValues": values}, "outputs": {"outputFile": f"{scratch}/{name}.json"}})
        container = spec["deploymentSpec"]["executors"][f"exec-{name}"]["container"]
        inside(*(word.replace("{{$}}", told) for word in (*container["command"], *container["args"])))
        return dict(
            json.loads(inside("sh", "-c", f"cat {scratch}/{name}.json || echo '{{}}'")).get("parameterValues", {})
        )

    kinds = step("survey")["kinds"]
    expect(len(kinds) == 1, f"the survey found {len(kinds)} kinds of hardware to measure here, not 1")
    if kind == "cpu":
        # the CronJob's command, with nobody there to answer: it has read the pipeline that it carries, and would ask for 10 min
        told = inside(
            "sh", "-c", "timeout 20 neuroshard submit --set pods=2 --endpoint http://127.0.0.1:9 2>&1 || true"
        )
        expect("does not answer" in told, f"neuroshard submit: {told.strip()[-200:]}")
        return f"surveyed {kinds[0]}; neuroshard submit reads its pipeline"
    [share] = step("augment", kind=kinds[0])["shares"]
    step("measure", kind=kinds[0], share=share)
    parts = inside("sh", "-c", f"ls {scratch}/store/_measuring/*/*/*/costs-1-of-1").split()
    expect("costs.json" in parts, f"measure left {parts}")
    return f"measured into {len(parts)} files"


def pip_mounts(scratch: Path) -> list[str]:
    """This machine's certificates and pip configuration, with the local folders that it names, for the time of the build."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    settings = dict(re.findall(r"^(?::env:|[a-z-]+)\.([a-z-]+)='(.*)'$", listed, re.M))
    told = {key: settings[key] for key in ("index-url", "extra-index-url", "find-links", "cert") if key in settings}
    (scratch / "pip.conf").write_text("\n".join(["[global]", *(f"{key} = {value}" for key, value in told.items()), ""]))
    words = " ".join(told.values()).split()
    # an index of files names its packages from the folder above
    folders = {Path(word.removeprefix("file://")).parent for word in words if word.startswith("file:///")}
    folders |= {Path(word) for word in words if word.startswith("/")} | {Path(CERTIFICATES)}
    local = sorted(folder for folder in folders if folder.is_dir())
    return [f"{scratch}/pip.conf:/etc/pip.conf:ro", *(f"{folder}:{folder}:ro" for folder in local)]


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Failed(otherwise)


if __name__ == "__main__":
    main()
