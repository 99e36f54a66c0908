# make install | demo | test | test-all | matrix | attack | chaos | behaviour | check | docs | format | bench | bench-planner | bench-runtime | bench-probing | clean.
# Each does its own set-up; needs Python >= 3.11 and make. PYTHON=python3.12 chooses the interpreter; ARGS="-k plan" goes to pytest
# (test, test-all, matrix), to skyctl (demo) or to the benchmark (bench-planner, -runtime, -probing, chaos); WORKERS=0: one test at a time (for --pdb).
# All paths are relative: the folder's own name may hold blanks.

SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?=
ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: help install demo test test-all matrix attack chaos behaviour check docs format bench bench-planner bench-runtime bench-probing clean

help:
	@echo "make install        .venv with skyctl in it"
	@echo "make demo           the whole main job on this machine: no root, no SSH, no file needed"
	@echo "make test           the tests, about 8 minutes; without root the lab tests are left out"
	@echo "make test-all       those that take long or measure as well (what CI runs): half an hour"
	@echo "make matrix         the fault matrix over real SSH (docs/faults.md), and all of what CI takes a sample of: half an hour, needs root"
	@echo "make attack         strangers, a man in the middle, lying nodes, other users, over both backends (docs/security.md); needs root"
	@echo "make chaos          100 runs with faults drawn at random (docs/faults.md); goes on where it stopped; needs root"
	@echo "make behaviour      everything that was recorded of what commands do, compared: about 20 minutes"
	@echo "make check          linters, types, import contracts, links in the documents"
	@echo "make docs           the documents as a site: site/index.html"
	@echo "make format         puts the code into the shape that check asks for"
	@echo "make bench          benchmarks/*.py"
	@echo "make bench-planner  the planner's tables, printed and put into docs/planner.md (15 minutes)"
	@echo "make bench-runtime  the runtime against its bounds, over real links and real SSH; needs root (about half an hour)"
	@echo "make bench-probing  the probe against what a lab was set to, and how long it takes; needs root (about 40 minutes)"
	@echo "make clean          removes .venv and caches"

install: $(STAMP)
	@echo "skyctl is in $(BIN)/skyctl"

# Runs again when what it is made from has changed, and only then.
$(STAMP): pyproject.toml constraints.txt scripts/make_venv.sh
	@bash scripts/make_venv.sh "$(PYTHON)"
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/skyctl demo $(ARGS)

test: $(STAMP)
	@[ "$$(id -u)" = 0 ] || echo "not root: the lab tests (tests/lab) are left out"
	@bash scripts/run_tests.sh $(BIN)/python "not matrix and not recorded and not attack and not slow and not alone" $(ARGS)

test-all: $(STAMP)
	@[ "$$(id -u)" = 0 ] || echo "not root: the lab tests (tests/lab) are left out"
	@bash scripts/run_tests.sh $(BIN)/python "not matrix and not recorded and not attack" $(ARGS)

# The fault matrix over real SSH, and all of what CI takes a sample of: half an hour, as root.
matrix: $(STAMP)
	$(BIN)/python -m pytest -m matrix $(ARGS)

# The adversary's suite: what stands in tests/attack, the long tests included. As root. What came of it over each backend: build/attack.md.
attack: $(STAMP)
	$(BIN)/python -m pytest tests/attack $(ARGS)

# Seeded runs, each with faults drawn at random; its record is kept, so that it goes on where it was stopped. As root.
chaos: $(STAMP)
	$(BIN)/python benchmarks/chaos.py $(ARGS)

# Whether skyctl still does what was recorded before its rooms were named anew, run by run: about 20 minutes.
behaviour: $(STAMP)
	$(BIN)/python -m pytest -m recorded $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPY_NUM_WORKERS=2 $(BIN)/mypy
	MYPY_NUM_WORKERS=2 $(BIN)/python scripts/check_node_python.py
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_docs_links.py
	$(BIN)/python scripts/check_docs_style.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs: $(STAMP)
	$(BIN)/python scripts/make_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html"

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	@shopt -s nullglob; for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python "$$file" || exit 1; done

bench-planner: $(STAMP)
	$(BIN)/python benchmarks/planner.py --write $(ARGS)

bench-runtime: $(STAMP)
	$(BIN)/python benchmarks/runtime.py $(ARGS)

bench-probing: $(STAMP)
	$(BIN)/python benchmarks/probing.py $(ARGS)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build site
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
