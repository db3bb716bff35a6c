#!/usr/bin/env bash
# One would guess: td.items() and td.values() give what td[key] gives, as those of a dict do.
# What happens: for a value that is no tensor (TorchRec's JaggedTensor, a text) td[key] gives the value itself; items(),
# values(), get() and pop() give a NonTensorData that holds it in `.data`.
# Seen with: tensordict 0.15.3, torchrec 1.8.0, on 28 November 2026.
# Why it matters: code that goes over a batch by items() gets no `.values()` and `.lengths()`, and what asks for the type takes
# the feature for something else. Go over its keys.
#
# Ends with 0 if that holds, with 1 if it changed, with 2 if the packages could not be installed.
set -euo pipefail
export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" || exit 2; }
"${PYTHON:-python3}" -m venv "$work/venv" || exit 2
install torch==2.13.0 fbgemm-gpu-cpu==1.8.0 tensordict==0.15.3 torchmetrics==1.0.3 tqdm==4.70.1 pyre-extensions==0.0.32
install --no-deps torchrec==1.8.0 # its own requirements name the CUDA build of FBGEMM

cat > "$work/check.py" <<'END'
import logging
import sys
from importlib.metadata import version

import torch

logging.disable(logging.CRITICAL)
from tensordict import NonTensorData, TensorDict
from torchrec import JaggedTensor

print(*(f"{name} {version(name)}" for name in ("torch", "tensordict", "torchrec")), sep=", ")
feature = JaggedTensor(values=torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))
batch = TensorDict({"feature": feature})
given = {
    "td[key]": batch["feature"],
    "items()": dict(batch.items())["feature"],
    "values()": next(iter(batch.values())),
    "get(key)": batch.get("feature"),
    "pop(key)": batch.clone().pop("feature"),
}
print("expected: a JaggedTensor from each")
print("seen:", ", ".join(f"{name}: {type(one).__name__}" for name, one in given.items()))
itself = isinstance(given.pop("td[key]"), JaggedTensor)
wrapped = all(isinstance(one, NonTensorData) and isinstance(one.data, JaggedTensor) for one in given.values())
sys.exit(not (itself and wrapped))
END
"$work/venv/bin/python" -W ignore "$work/check.py"
