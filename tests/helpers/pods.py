"""What a pod of the compiled pipeline sees: its limits, and its secrets."""

from collections.abc import Mapping
from pathlib import Path

import yaml

PACKAGE = Path(__file__).parents[2] / "pipelines" / "neuroshard.yaml"
TOKEN = "var/run/secrets/kubernetes.io/serviceaccount/token"
GIB = 2**30


def machine(
    folder: Path, *, memory_bytes: int, cores: int = 2, cpu: str = "AMD EPYC 7763", node_bytes: int = 64 * GIB
) -> Path:
    """A root folder as a pod with these limits sees it, for NEUROSHARD_SYSTEM_ROOT; it has a token of its service account."""
    files = {
        TOKEN: "a token",
        "proc/cpuinfo": f"model name\t: {cpu}\n",
        "proc/meminfo": f"MemTotal: {node_bytes // 1024} kB\nMemAvailable: {node_bytes // 1024} kB\n",
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/memory.max": str(memory_bytes),
        "sys/fs/cgroup/memory.current": str(2**20),
        "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
        "sys/fs/cgroup/cpu.max": f"{cores * 100_000} 100000",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def secrets_of(there: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The environment that the package gives every step, by its defaults, where these are the namespace's secrets."""
    spec, platform = yaml.safe_load_all(PACKAGE.read_text())
    defaults = spec["root"]["inputDefinitions"]["parameters"]
    given: dict[str, str] = {}
    for executor in platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"].values():
        for entry in executor["secretAsEnv"]:
            source = entry["secretNameParameter"]
            parameter = source.get("componentInputParameter", "").removeprefix("pipelinechannel--")
            name = defaults[parameter]["defaultValue"] if parameter else source["runtimeValue"]["constant"]
            assert name in there or entry["optional"]
            given |= {
                one["envVar"]: there[name][one["secretKey"]]
                for one in entry["keyToEnv"]
                if one["secretKey"] in there.get(name, {})
            }
    return given
