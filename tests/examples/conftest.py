"""The worked trainer as a module, for tests that call its functions or fork it."""

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType

import pytest

TRAIN = Path(__file__).parents[2] / "examples" / "train.py"


@pytest.fixture(scope="session")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_example", TRAIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchrec and FBGEMM, while they are imported
        spec.loader.exec_module(module)
    return module
