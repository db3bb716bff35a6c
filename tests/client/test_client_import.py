"""The front door is light: what importing it loads. How long that takes is in `make bench-release`."""

import subprocess
import sys

from helpers.limits import HANGS

HEAVY = {"torch", "torchrec", "fbgemm_gpu", "pandas", "numpy", "kfp", "pyarrow", "rich", "typer", "boto3", "botocore"}


def loaded(code: str) -> set[str]:
    """Top-level modules that are loaded after `code` in a fresh interpreter."""
    script = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANGS, check=True)
    return set(done.stdout.split())


def test_the_client_loads_nothing_heavy():
    assert loaded("from neuroshard.client import Plan, load_plan") & HEAVY == set()


def test_the_client_loads_pydantic_and_python_only():
    pydantic = {"pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"}

    got = loaded("import neuroshard.client") - loaded("import sysconfig; sysconfig.get_config_vars()")

    assert got - sys.stdlib_module_names == {"neuroshard", *pydantic}


def test_no_type_is_built_before_it_is_used():
    """Building the first one makes pydantic look for plugins in every installed package: 40 of 170 ms."""
    used = "import neuroshard.client\nfrom neuroshard.core.value import Value\n"
    used += "def below(c): return [c] + [d for b in c.__subclasses__() for d in below(b)]\n"
    used += "print(*[c.__name__ for c in below(Value) if c.__pydantic_complete__], 'of', len(below(Value)))"
    done = subprocess.run([sys.executable, "-c", used], capture_output=True, text=True, timeout=HANGS, check=True)

    built, count = done.stdout.split("of")
    assert built.split() == []
    assert int(count) > 10


def test_a_folder_store_needs_no_boto3():
    assert loaded("from neuroshard.store.open import open_store; open_store('runs/store')") & HEAVY == set()


def test_an_s3_store_needs_boto3_and_nothing_else_heavy():
    got = loaded("from neuroshard.store.open import open_store; open_store('s3://bucket/prefix')")

    assert got & HEAVY == {"boto3", "botocore"}
