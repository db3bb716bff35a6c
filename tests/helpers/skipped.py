"""Why tests were skipped, and what would run them: the last thing that `make test` says."""

import re
from collections import Counter
from collections.abc import Sequence

# what a reason says -> what would run the tests; the first that fits counts
WAYS_OUT = {
    r"NVIDIA GPUs": "a machine with as many NVIDIA GPUs, and the fbgemm-gpu that fits its torch",
    r"needs an NVIDIA GPU": "a machine with an NVIDIA GPU, and the fbgemm-gpu that fits its torch",
    r"could not import 'pynvml'": "pip install nvidia-ml-py",
    r"there is a GPU": "CUDA_VISIBLE_DEVICES= make test",
    r"no Chromium": "apt-get install chromium",
    r"kubectl is not installed": "kubectl (https://kubernetes.io/docs/tasks/tools)",
    r"root may": "make test as another user than root",
    r"needs make": "apt-get install make",
    r"figures of others": "a checkout that lies beside shared/truth",
    r"recordings": "a checkout that lies beside shared/recorded",
    r"a part of TorchRec 1.9": "make test-next",
    r"/proc|Linux": "a Linux machine",
}


def way_out(reason: str) -> str:
    """What would run the tests that were skipped for this reason; empty where nobody has said."""
    return next((way for pattern, way in WAYS_OUT.items() if re.search(pattern, reason)), "")


def summary(reasons: Sequence[str]) -> list[str]:
    """A line for each reason, the most frequent first."""
    counted = Counter(reason.removeprefix("Skipped: ") for reason in reasons)
    return [
        f"{count:>4} skipped: {reason}; to run: {way_out(reason) or '(see the reason)'}"
        for reason, count in counted.most_common()
    ]
