# Every word sets up what it needs: on a fresh machine `make demo` and `make test` are enough.
# Another interpreter: make PYTHON=python3.12 <word>

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
FLOOR := .venv-floor

# tests that start clusters of workers, or several processes of other hosts, again and again
WORKER_TESTS := tests/slurm tests/hosts tests/cluster $(wildcard tests/extraction/test_parallel_*.py) \
  tests/collect_stats/test_collect_stats_workers.py tests/collect_stats/test_collect_stats_faults.py \
  tests/brain/test_brain_ddp.py tests/recipes/test_recipe_librispeech.py tests/recipes/test_recipe_quantization.py \
  tests/interop/test_interop_huggingface.py tests/lazy/test_many_processes.py \
  tests/loading/test_exactly_once.py tests/brain/test_added_features.py tests/remote/test_remote_forks.py

# tests that kill processes or fill disks while others work, beside the harnesses that do so by the thousand;
# that of the states runs processes of its own
CRASH_STATES := tests/crash/test_crashes.py
CRASH_TESTS := tests/crash tests/store/test_store_kill.py tests/store/test_store_crashes.py tests/store/test_left_names.py \
  tests/store/writing/test_sealed_in_place.py tests/loading/test_leaving.py \
  tests/store/test_feature_sets_crashes.py tests/extraction/test_convert_killed.py \
  tests/lazy/test_shared_functions.py tests/recipes/test_recipe_mix.py tests/remote/test_transfer_kills.py
FAULT_CALLS := tests/faults/test_faults.py
FAULT_TESTS := tests/faults tests/store/writing/test_failed_publish.py tests/store/writing/test_store_full_disk.py \
  tests/remote/test_remote_faults.py tests/remote/test_transfer_faults.py

# tests of pages, in a browser
LOOK_TESTS := tests/report/test_report_browser.py

# tests of what threads, forks and interrupts may do: FEATCACHE_ROUNDS times each
SHARING_TESTS := tests/test_sharing.py tests/lazy/test_shared_functions.py \
  tests/store/writing/test_shared_writers.py tests/store/test_left_names.py \
  tests/crash/test_interrupted_reads.py tests/crash/test_interrupted_verbs.py

# tests start hundreds of Pythons, of which each would compile what it imports
unexport PYTHONDONTWRITEBYTECODE

NOT_IN_TEST := $(addprefix --ignore=,$(WORKER_TESTS) $(CRASH_TESTS) $(FAULT_TESTS) $(LOOK_TESTS))

.PHONY: setup demo stale test look workers crash torture faults fuzz rightness floor lint fmt check map bench speed mutants clean

setup: $(STAMP)  ## make .venv and install the pinned versions

demo: setup  ## cache the features of spoken digits, train from the cache, test
	$(BIN)/python recipes/digits/train.py recipes/digits/hparams.yaml

stale: setup  ## change a weight and a recording of a cache, kill its writer, and see what is said
	$(BIN)/python recipes/digits/stale.py

test: setup  ## run the tests, but for those that the words below run
	$(BIN)/pytest -n 2 --dist loadfile $(NOT_IN_TEST)

look: setup  ## look at pages of reports in Chromium, which this installs where apt-get can; two minutes
	tests/report/install_browser.sh || echo "no browser can be installed here: its tests are skipped"
	$(BIN)/pytest $(LOOK_TESTS)

workers: setup  ## run the tests that start Dask workers, on SLURM too where it is installed
	$(BIN)/pytest tests/slurm
	$(BIN)/pytest $(filter-out tests/slurm,$(WORKER_TESTS)) -n 2 --dist loadfile

crash: setup  ## crash writers in thousands of ways and see that nothing is lost; 15 minutes, needs strace
	$(BIN)/pytest $(CRASH_STATES) -s --override-ini=timeout=3600
	$(BIN)/pytest $(CRASH_TESTS) --deselect $(CRASH_STATES) -n 2 -rP --show-capture=stdout --override-ini=timeout=3600

torture: setup  ## kill the demo again and again; threads, forks, interrupts by the hundred; half an hour
	$(BIN)/pytest tests/torture -s --override-ini=timeout=3600
	FEATCACHE_ROUNDS=300 $(BIN)/pytest -n 2 $(SHARING_TESTS) --override-ini=timeout=3600

faults: setup  ## let system calls of writers fail, 2,112 of them, and answers of a store, each at each request; five minutes (FEATCACHE_FAULTS=20000 tries more)
	$(BIN)/pytest $(FAULT_CALLS) -s --override-ini=timeout=3600
	$(BIN)/pytest $(FAULT_TESTS) --deselect $(FAULT_CALLS) -n 2 --dist loadfile --override-ini=timeout=3600

fuzz: setup  ## damage caches, and what is adopted, in every way, 20,000 times each and more; fifteen minutes (FEATCACHE_FUZZ=10 tries ten times as many)
	$(BIN)/pytest tests/fuzz -s --override-ini=timeout=3600

rightness: setup  ## change two recipes in hundreds of ways: what matters must be noticed, nothing else; 20 minutes
	$(BIN)/pytest tests/rightness -s --override-ini=timeout=21600

floor: $(FLOOR)/.set-up  ## run the tests of `make test` with the lowest versions that pyproject.toml allows, on Python 3.11
	$(FLOOR)/bin/pytest -p no:anyio $(NOT_IN_TEST)  # the plugin of an older anyio is deprecated by pytest

lint: setup  ## look for mistakes that a look at the text finds
	$(BIN)/ruff check

fmt: setup  ## lay out all code
	$(BIN)/ruff format

map: setup  ## write the maps of the packages, in CONTRIBUTING.md, and of the files, docs/files.md, anew
	$(BIN)/python tests/docs/house_map.py

check: setup  ## layout, lint, types, direction of imports
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup  ## measure reading, feeding and scale, against the peers; about twenty minutes, 6 GB of temporary files
	$(BIN)/pip install --quiet -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/run.py

speed: setup  ## measure eight figures against the commit before, in turns, and say which became slower; five minutes
	$(BIN)/python benchmarks/speed.py

mutants: setup  ## make small mistakes in the library, 300 of them, and see whether a test notices; half an hour
	mkdir -p results && rm -f results/mutants.*
	$(BIN)/python tests/mutants/mutants.py map results/mutants.json $(NOT_IN_TEST) tests
	$(BIN)/python tests/mutants/mutants.py run results/mutants.json results/mutants.txt $(NOT_IN_TEST) tests

clean:  ## remove everything that the words above made
	rm -rf $(VENV) $(FLOOR) results recipes/*/results build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and pinned: a bare `torch` would be chosen anew, and brings several GB with it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "featcache needs Python 3.11 or newer, $(PYTHON) is older; try: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@$(call drop_cuda_torchaudio,$(VENV))
	@touch $@

$(FLOOR)/.set-up: pyproject.toml constraints.txt tests/lowest_versions.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	  { echo "the lowest versions are those of Python 3.11, $(PYTHON) is another; try: make PYTHON=python3.11 floor"; exit 1; }
	$(PYTHON) -m venv --clear $(FLOOR)
	$(PYTHON) tests/lowest_versions.py > $(FLOOR)/constraints.txt
	$(FLOOR)/bin/pip install --quiet -c $(FLOOR)/constraints.txt torch
	$(FLOOR)/bin/pip install --quiet -c $(FLOOR)/constraints.txt -e '.[all,plot,testing]' pytest-timeout hydra-core \
	  kaldiio safetensors \
	  'pyparsing<3.3'  # in 3.3, what matplotlib 3.8.4 calls is deprecated
	@$(call drop_cuda_torchaudio,$(FLOOR))
	@touch $@

# torchaudio's wheel is built against CUDA torch: beside another torch one optional library fails to load and takes
# `import torchaudio` down; without that file torchaudio works.
define drop_cuda_torchaudio
if $(1)/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' \
  && ! $(1)/bin/python -c 'import torchaudio' 2>/dev/null; then \
  for library in $(1)/lib/python3*/site-packages/torchaudio/lib/_torchaudio*.so; do \
    mv "$$library" "$$library.unused" \
    && echo "torch has no CUDA: moved torchaudio's optional $$library out of the way (to .unused), it fails to load"; \
  done; \
fi
endef
