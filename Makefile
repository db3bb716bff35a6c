# Everything runs in .venv, which the first target that needs it makes from the locks in requirements/.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup run test test-fast test-next test-kfp check fix size compile images-check manifests-check apiserver-test gpu extras-check everything nightly findings package docs bench bench-cache bench-corpus bench-machines bench-memory bench-pretrain bench-release bench-sequences bench-rows bench-search bench-tiers bench-nights bench-hosts bench-seen bench-traces bench-truth bench-page submit lock clean

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
LOCKED := $(PIP) --no-build-isolation --require-hashes --no-deps -r
SOURCES := components docs pipelines requirements tests $(wildcard examples)
OF_TORCH := $(addprefix tests/,client doctor examples measure)
EXPERIMENT ?= neuroshard
JOBS ?= 2
ARGS ?=

export PYTHONUNBUFFERED := 1
# Where it is set, each of the many processes that a run or the tests start would compile this package again.
unexport PYTHONDONTWRITEBYTECODE

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do printf '%-15s %s\n' "$$name" "$$text"; done

setup: .venv/run.done ## make .venv and install what `make run` needs

run: .venv/run.done ## the whole pipeline on this CPU, ending in a plan that a trainer trains with; ARGS="--help" for options
	@NEUROSHARD_END_WITH_PARENT=$$PPID exec $(BIN)/python -m pipelines.run_local $(ARGS)

test: .venv/dev.done ## before you hand in: all tests, two at a time; ARGS="tests/core -k plan" for some, JOBS=0 for one process
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-fast: .venv/dev.done ## while you write: the tests that start no process and train no net; ARGS="tests/core" for some
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" $(ARGS)

test-next: .venv-next/next.done ## client, doctor, examples and measuring under the newer torch, FBGEMM and TorchRec, in a venv of its own; ARGS="tests/client"
	@OMP_NUM_THREADS=1 .venv-next/bin/python -m pytest -n $(JOBS) --dist worksteal -p no:cacheprovider $(or $(ARGS),$(OF_TORCH))

test-kfp: .venv-kfp/kfp.done ## the pipeline and its submission under the newest kfp of PyPI, in a venv of its own
	@OMP_NUM_THREADS=1 .venv-kfp/bin/python -m pytest -n $(JOBS) --dist worksteal -p no:cacheprovider $(or $(ARGS),tests/pipelines tests/submit)

check: .venv/dev.done ## formatting, lint, types, imports, unsafe calls, whether the compiled pipeline is current, and ceilings of lines
	@$(BIN)/ruff format --check --quiet $(SOURCES) || { echo "not formatted: make fix" >&2; exit 1; }
	@$(BIN)/ruff check --quiet $(SOURCES)
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/bandit --quiet -c pyproject.toml -r components
	@$(BIN)/python -m pipelines.compile --check
	@$(BIN)/python tests/infra/size.py --check

fix: .venv/dev.done ## format, and mend what lint can mend by itself
	@$(BIN)/ruff format $(SOURCES)
	@$(BIN)/ruff check --fix $(SOURCES)

size: .venv/dev.done ## lines of code by room, and characters of pages, against ceilings that only fall; ARGS=--lower after removing some
	@$(BIN)/python tests/infra/size.py $(ARGS)

compile: .venv/run.done ## pipelines/neuroshard.py -> pipelines/neuroshard.yaml
	@$(BIN)/python -m pipelines.compile

images-check: .venv/run.done ## build both images without a registry and look into them (needs root, buildah, debootstrap); ARGS=--help
	@$(BIN)/python images/check.py $(ARGS)

manifests-check: .venv/dev.done ## render both overlays, validate them, and hold them against the security rules (needs kubectl)
	@rendered=$$(mktemp -d); trap 'rm -rf "$$rendered"' EXIT; \
	for overlay in dev prod; do \
	  kubectl kustomize manifests/overlays/$$overlay > "$$rendered/$$overlay.yaml"; \
	  $(BIN)/kubernetes-validate --strict --quiet "$$rendered/$$overlay.yaml"; \
	  echo "manifests/overlays/$$overlay: $$(grep -c '^kind:' "$$rendered/$$overlay.yaml") resources, valid"; \
	done
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/infra/test_manifests.py

apiserver-test: .venv/dev.done ## the rendered RBAC and the fleet probe on a real kube-apiserver and etcd, built first: ten minutes (Debian 12, Go 1.19)
	@$(BIN)/python tests/apiserver/check.py $(ARGS)

gpu: .venv/run.done ## on a machine with an NVIDIA GPU: measure it, train its cost model, run plans on it; ARGS="--backend cpu" rehearses
	@$(BIN)/python tests/bench/gpu.py $(ARGS)

extras-check: .venv/run.done ## install every extra alone in a fresh venv, and run what it is for: ARGS="--only search --python 3.12", --help
	@$(BIN)/python tests/infra/extras.py $(ARGS)

everything: .venv/dev.done ## run each target and bench in a small form; what of them, commands on pages and examples is not run, and why
	@$(BIN)/python tests/infra/everything.py $(ARGS)

nightly: .venv/dev.done ## what .ci/run leaves out while its inputs stay: simulated machines and the newer versions, whole; notes what passes
	@$(BIN)/python tests/infra/tried.py --note $(ARGS)

findings: .venv/bin/python ## do the surprises of other libraries in findings/ still hold? Each is tried in a fresh venv; ARGS="findings/pyarrow*" for some
	@export PYTHON="$(CURDIR)/$(BIN)/python"; said=; failed=0; \
	for script in $(or $(ARGS),findings/*.sh); do \
	  echo "== $$script"; ended=0; bash "$$script" || ended=$$?; \
	  case $$ended in 0) found=holds;; 1) found=changed; failed=1;; *) found='could not be tried'; failed=1;; esac; \
	  said+="$$script: $$found"$$'\n'; \
	done; \
	printf '==\n%s' "$$said"; exit $$failed

package: .venv/dev.done ## build sdist and wheel into dist/, and try each in a fresh venv without a network: half a minute
	@$(BIN)/python tests/infra/package.py

docs: .venv/docs.done ## the docs as a site, in build/site/index.html; a link that leads nowhere is an error, and nothing is fetched
	@rm -rf build/docs build/site && mkdir -p build/docs
	@cp -r README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md LICENSE docs examples components build/docs/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo build/site/index.html

bench: .venv/dev.done ## run every script of tests/bench
	@set -- $(sort $(wildcard tests/bench/*.py)); \
	[ $$# -gt 0 ] || echo "tests/bench holds no scripts"; \
	for script; do echo "== $$script"; $(BIN)/python "$$script" $(ARGS); done

bench-cache: .venv/dev.done ## misses predicted beside those of a simulated FBGEMM cache; ARGS="--ratings u.data --requests FILE", --quick
	@$(BIN)/python tests/bench/cache.py $(ARGS)

bench-corpus: .venv/dev.done ## a hundred tasks with every option, searched here and by another commit side by side; ARGS="--against COMMIT", --quick
	@$(BIN)/python tests/bench/corpus.py $(ARGS)

bench-machines: .venv/dev.done ## `make run` on machines that this one is not: caches, cores, memory, paths, networks; ARGS="--only '1 core'", --quick
	@$(BIN)/python tests/bench/machines.py $(ARGS)

bench-memory: .venv/dev.done ## what a step takes of memory beside live bytes of real steps of TorchRec on gloo ranks; ARGS=--quick
	@$(BIN)/python tests/bench/memory.py $(ARGS)

bench-pretrain: .venv/dev.done ## our cost models beside the paper's nets and recipe on the same data; ARGS="--tables FILE --costs FOLDER", --quick
	@$(BIN)/python tests/bench/pretrain.py $(ARGS)

bench-release: .venv/dev.done ## what a trainer waits for, and its steps by four planners' plans, as tables; ARGS=--quick
	@$(BIN)/python tests/bench/release.py $(ARGS)
	@$(BIN)/python tests/bench/trainer.py $(ARGS)

bench-sequences: .venv/dev.done ## DLRMv4's tables: our plans beside those of TorchRec's planner and of the benchmark's makers, priced, and run on gloo ranks by a scaled copy; ARGS=--quick
	@$(BIN)/python tests/bench/dlrmv4.py $(ARGS)

bench-rows: .venv/dev.done ## what copies of hot rows cost and save two gloo ranks; ARGS="--ratings u.data --requests FILE" (real streams), --quick
	@$(BIN)/python tests/bench/rows.py $(ARGS)

bench-search: .venv/dev.done ## our search beside its peers; ARGS="--tables-dir FOLDER" of public table sets, --quick for some of it
	@$(BIN)/python tests/bench/search.py $(ARGS)

bench-tiers: .venv/dev.done ## plans of tables that HBM does not hold beside optima, TorchRec's and bounds; ARGS="--tables-dir FOLDER", --quick
	@$(BIN)/python tests/bench/tiers.py $(ARGS)

bench-nights: .venv/dev.done ## nights on the local runner: the fleet changes, the store goes away, the run is killed at every step; ARGS=--quick
	@$(BIN)/python tests/bench/nights.py $(ARGS)

bench-hosts: .venv/dev.done ## trainers on hosts with slow links between them (network namespaces; as root), by plans that know of it or not
	@$(BIN)/python tests/bench/hosts.py $(ARGS)

bench-seen: .venv/dev.done ## promises by a datasheet beside what trainers see, before and after other jobs corrected it, on this CPU; ARGS=--quick
	@$(BIN)/python tests/bench/seen.py $(ARGS)

bench-traces: .venv/dev.done ## real lookups beside those drawn by their reuse bins, on this CPU; ARGS="--ratings u.data" (MovieLens 100K's)
	@$(BIN)/python tests/bench/traces.py $(ARGS)

bench-truth: .venv/dev.done ## costs from datasheets beside figures of real GPUs that others measured; ARGS="--figures FOLDER"
	@$(BIN)/python tests/bench/truth.py $(ARGS)

bench-page: .venv/dev.done ## docs/benchmarks/*.json -> docs/benchmarks.md; a bench writes its tables there with ARGS=--publish
	@$(BIN)/python tests/bench/publishing/page.py

submit: .venv/run.done ## run the compiled pipeline on the cluster at KFP_ENDPOINT; ARGS="store=s3://bucket/prefix"
	@: "$${KFP_ENDPOINT:?give the address of the Kubeflow Pipelines API, as in KFP_ENDPOINT=http://localhost:8888 make submit}"
	@$(BIN)/kfp run create -e $(EXPERIMENT) -f pipelines/neuroshard.yaml $(ARGS)

lock: .venv/dev.done ## renew requirements/*.txt from pyproject.toml
	@$(BIN)/python requirements/lock.py

clean: ## remove .venv, caches and the outputs of `make run`
	@rm -rf .venv .venv-next run bench build dist local_outputs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -prune -exec rm -rf {} +
	@rm -rf components/neuroshard.egg-info

# PYTHON=/path/to/python3 chooses one. It is tried, not only looked for: a pyenv shim may exist and still not run.
PYTHONS := $(or $(PYTHON),python3.11 python3 python3.12 python3.13)
.venv/bin/python:
	@for python in $(PYTHONS); do \
	  "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || continue; \
	  "$$python" -c 'import ensurepip' 2>/dev/null || { echo "$$python cannot make a venv; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }; \
	  echo "making .venv with $$python" >&2; \
	  exec "$$python" -m venv .venv; \
	done; \
	echo "NeuroShard needs Python 3.11 to 3.13, and none of these is: $(PYTHONS). Choose one: make PYTHON=/path/to/python3.11" >&2; exit 1

LOCKS := $(addprefix requirements/,build.txt run.txt torch-cpu.txt torch-cuda.txt torchrec.txt)
.venv/run.done: .venv/bin/python $(LOCKS) pyproject.toml
	@echo "installing what is pinned in requirements/run.txt and a torch file (a minute or two)" >&2
	@$(LOCKED) requirements/build.txt
	@$(LOCKED) requirements/run.txt
	@if ! wrong=$$($(LOCKED) requirements/torch-cpu.txt 2>&1); then \
	  grep -Eq 'No matching distribution|ResolutionImpossible' <<< "$$wrong" || { echo "$$wrong" >&2; exit 1; }; \
	  echo 'pip finds no CPU build of torch: installing the CUDA build, 3 GB more (with PIP_EXTRA_INDEX_URL set to the index of CPU builds that PyTorch names on its site, make setup finds it)' >&2; \
	  $(LOCKED) requirements/torch-cuda.txt; \
	fi
	@$(LOCKED) requirements/torchrec.txt
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

.venv/dev.done: .venv/run.done requirements/dev.txt
	@echo "installing what is pinned in requirements/dev.txt" >&2
	@$(LOCKED) requirements/dev.txt
	@touch $@

# It has what requirements/next.txt pins, and finds everything else in .venv.
.venv-next/next.done: .venv/dev.done requirements/next.txt
	@echo "installing what is pinned in requirements/next.txt: 5 GB, for torch has no CPU build on PyPI (a minute or two)" >&2
	@$(BIN)/python -m venv --clear --without-pip .venv-next
	@$(BIN)/python -m pip --python .venv-next install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/next.txt
	@.venv-next/bin/python -c 'import pathlib, sys, sysconfig; \
	  pathlib.Path(sysconfig.get_path("purelib"), "main.pth").write_text(f"import site; site.addsitedir({sys.argv[1]!r})\n")' \
	  "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@ln -s ../../$(BIN)/rclone .venv-next/bin/
	@touch $@

# It has the newest kfp, and finds everything else in .venv. Unlike all others it is not pinned: what is newest is what is tried.
.venv-kfp/kfp.done: .venv/dev.done
	@$(BIN)/python -m venv --clear --without-pip .venv-kfp
	@$(BIN)/python -m pip --python .venv-kfp install --quiet --disable-pip-version-check --no-deps kfp kfp-kubernetes kfp-pipeline-spec kfp-server-api
	@.venv-kfp/bin/python -c 'import pathlib, sys, sysconfig; \
	  pathlib.Path(sysconfig.get_path("purelib"), "main.pth").write_text(f"import site; site.addsitedir({sys.argv[1]!r})\n")' \
	  "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@ln -s ../../$(BIN)/rclone .venv-kfp/bin/
	@touch $@

.venv/docs.done: .venv/dev.done requirements/docs.txt
	@echo "installing what is pinned in requirements/docs.txt" >&2
	@$(LOCKED) requirements/docs.txt
	@touch $@
