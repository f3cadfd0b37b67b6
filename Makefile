# make demo: set-up, then a pretrained model through file and C runtime.   make test: set-up, then all tests.
PYTHON ?= python3
BIN := .venv/bin
C_FILES := $(wildcard CMakeLists.txt cmake/* hal/*/*.[ch] hal/*/*.def hal/include/trivet/*.h runtime_c/*/*.[ch] \
             runtime_c/include/trivet/*.h schema/gen/*.h)
C_STYLED := $(wildcard hal/*/*.[ch] hal/include/trivet/*.h runtime_c/*/*.[ch] runtime_c/include/trivet/*.h tests/c/*.[ch] \
              tests/hal/*.[ch] tests/ops/emulated/*.c tests/mcu/*.c tests/fuzz/*.c)

.PHONY: demo test bench lint format generate clean

demo: .venv/ready
	$(BIN)/python examples/01_hello/hello.py

test: .venv/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile tests

# The package with its C library, editable: Python changes count at once, C changes rebuild it.
.venv/ready: .venv/tools $(C_FILES) pyproject.toml
	$(BIN)/python -m pip install -q --no-build-isolation --no-deps -e .
	touch $@

.venv/tools: pyproject.toml constraints.txt tests/e2e/requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt torch torchao numpy flatbuffers cffi rich scikit-build-core cmake ninja \
	  pytest pytest-xdist hypothesis ruff mypy clang-format pillow tokenizers safetensors gguf \
	  ziglang wasmtime
	$(BIN)/python -m pip install -q --no-deps -r tests/e2e/requirements.txt nvidia-cuda-nvrtc-cu12==12.6.85 nvidia-cuda-nvrtc==13.0.88
	touch $@

# A real race against other runtimes takes hours and their packages: tests/peers/README.md.
# Figures that the README files quote; times mean little on a busy machine, so no test asserts them.
bench: .venv/ready
	$(BIN)/python tests/bench.py

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(C_STYLED)
	$(BIN)/python schema/generate.py
	git diff --exit-code --stat -- schema/gen sdk/trivet/fbs

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_STYLED)

# Files derived from the schema; CI checks that they are current.
generate: .venv/ready
	$(BIN)/python schema/generate.py

clean:
	rm -rf build .venv
