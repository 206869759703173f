# make help lists the targets.
SHELL := /bin/bash
PYTHON ?=
export PYTHON
# Another active virtual environment must not leak into this one.
unexport _ROS_WHEELS_BOOTSTRAP_COMPLETE PYTHONHOME VIRTUAL_ENV
# With a system-wide ROS 2, source the overlay with the built messages first.
IN := if [ -f .venv/ros.sh ]; then . .venv/ros.sh; fi; export HOME="$${HOME:-$$PWD/.cache}";
BIN := .venv/bin
SIDE_BY_SIDE := -n auto --maxprocesses 4 --dist loadgroup
ARGS ?=

.PHONY: help setup demo smoke test test-all vllm-venv test-engine figures lint format lock sbom train package clean distclean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

setup: ## make .venv, build the messages, install dsd and the nodes (quick if nothing changed)
	@command -v python3 >/dev/null || { echo "setup: python3 is missing; on Debian and Ubuntu: apt-get install python3 python3-venv" >&2; exit 1; }
	@python3 tools/setup.py

demo: setup ## the simulated Go2 finds the silver bottle; ARGS="--transport websocket --mode ar ..."
	@$(IN) $(BIN)/dsd demo $(ARGS)

smoke: setup ## the quick tests, without nodes and slow models: under two minutes
	@$(IN) $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m smoke $(ARGS)

test: setup ## the tests; ARGS="-k name" selects some
	@$(IN) $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow and not engine" $(ARGS)

test-all: setup ## all tests, slow ones included, but those of engines
	@$(IN) $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not engine" $(ARGS)

vllm-venv: ## make .venv-vllm: vLLM for CPUs, for dsd verifier --backend vllm (3.6 GB)
	@python3 tools/vllm_venv.py

test-engine: setup vllm-venv ## the tests with a real vLLM: 15 minutes
	@$(IN) $(BIN)/python -m pytest -m engine $(ARGS)

figures: setup ## measure every figure of the pages that is of earlier weights or code; ARGS="--dry-run", "modes-*"
	@$(IN) $(BIN)/dsd-lab figures $(ARGS)

lint: setup ## ruff, the type checker, and what Python 3.10 lacks
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/vermin --quiet --no-tips -t=3.10- src launch examples tools deploy setup.py

format: setup ## rewrite the code as ruff formats it
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

lock: setup ## rewrite requirements/lock.txt after a change in requirements/; ARGS="--upgrade-package name"
	@$(BIN)/python -m pip install --quiet --require-hashes -r requirements/audit.txt
	@PATH="$(BIN):$$PATH" $(BIN)/python tools/lock.py $(ARGS)

sbom: ## write sbom.cdx.json, a CycloneDX bill of the locked packages and the shipped models
	@python3 tools/sbom.py sbom.cdx.json

package: setup ## build wheel and source distribution in dist/, reproducibly, and decode a reply in an empty environment
	@$(BIN)/python tools/package.py $(ARGS)

train: setup ## retrain the shipped pair (hours); ARGS are those of dsd-lab train
	@$(IN) $(BIN)/dsd-lab train $(ARGS)

clean: ## remove caches and build products, keep .venv
	rm -rf build dist install log .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src test tools launch -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## remove .venv, .venv-vllm and .venv-ray too
	rm -rf .venv .venv-vllm .venv-ray src/*.egg-info src/dsd_lab/*.egg-info

.PHONY: ray-venv
ray-venv: setup ## make .venv-ray for deploy/ray_serve.py and its test (500 MB)
	@test -x .venv-ray/bin/serve || { python3 -m venv .venv-ray && .venv-ray/bin/python -m pip install --quiet "ray[serve]==2.60.0" psutil==7.2.2; }
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
	  "$$(.venv-ray/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/zz_dsd.pth"
