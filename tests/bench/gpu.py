"""The day a GPU is there: measure it, train its cost model, and compare plans on it.

    make gpu                                     on a machine with an NVIDIA GPU and this project's environment
    python tests/bench/gpu.py --wheels W         where make is missing: installs packages from a folder of wheels
    python tests/bench/gpu.py --backend cpu      the rehearsal: the same stages, a tenth of the cases

A call takes --minutes at most, and the same command continues where it ended; all stages take about 45 on one GPU. All results
are in one folder: bring back the cost model, its costs, plans.jsonl and page.md.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "components")]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "components"), *filter(None, [os.environ.get("PYTHONPATH")])])

NEEDED = ("numpy", "pandas", "pyarrow", "pydantic", "typer", "rich", "fbgemm-gpu")
AGAIN = 3  # exit status: time was up, the same command continues


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=Path("run/gpu"), help="folder of the results [run/gpu]")
    parser.add_argument(
        "--backend", choices=("cuda", "cpu", "synthetic"), default="cuda", help="what to measure [cuda]"
    )
    parser.add_argument("--tables", type=Path, nargs="*", default=[], help="table sets [MLPerf's, which is built in]")
    parser.add_argument("--minutes", type=float, default=45.0, help="of this call, at most [45]")
    parser.add_argument("--tasks", type=int, help="of plans that are measured [30, or 3 in a rehearsal]")
    parser.add_argument("--cases", type=int, help="table sets that are measured [2000, or 200]")
    parser.add_argument("--wheels", type=Path, help="folder to install missing packages from, without network")
    options = parser.parse_args()
    if options.wheels is not None and (failed := _install(options.wheels)):
        print(f"error: {failed}", file=sys.stderr)
        return 1
    from dataclasses import replace

    from bench.gpu_day.page import SCALES, Day
    from bench.gpu_day.stages import run
    from neuroshard.core.errors import NeuroshardError

    scale = SCALES[options.backend]
    scale = replace(scale, tasks=options.tasks or scale.tasks, compute_cases=options.cases or scale.compute_cases)
    ends = time.monotonic() + 60 * options.minutes
    day = Day(options.out, scale, options.tables, _device_counts(options.backend), ends)
    try:
        return 0 if run(day) else AGAIN
    except NeuroshardError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _install(wheels: Path) -> str:
    """Why the packages cannot be installed; empty where they are."""
    if not wheels.is_dir():
        return f"--wheels {wheels} is no folder"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheels), *NEEDED],
        check=False,
    )
    return f"pip could not install {', '.join(NEEDED)} from {wheels}; its message is above" if done.returncode else ""


def _device_counts(backend: str) -> tuple[int, ...]:
    """Numbers of devices whose all-to-alls are measured: all GPUs here; on the CPU two and four processes."""
    if backend != "cuda":
        return (2, 4)
    import torch

    return tuple(count for count in (2, 4, 8) if count <= torch.cuda.device_count())


if __name__ == "__main__":
    sys.exit(main())
