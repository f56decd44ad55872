#!/bin/sh
# Makes the environment that the Makefile's targets run in: setup.sh FOLDER STOCK PYTHON [flags of pip].
# STOCK is 1 or empty; an empty PYTHON means the first of the usual names that will do.
venv=$1 stock=$2 candidates=${3:-python3 python3.14 python3.13 python3.12 python3.11 python}
shift 3

fail() {
	printf '%s\n' "$@" >&2
	exit 1
}

pip() {
	"$venv/bin/python" $pip "$@" --disable-pip-version-check
}

free() {
	df -Pk "$1" | awk -v folder="$1" 'NR == 2 { printf "%.1f GB free in %s", $4 * 1024 / 1e9, folder }'
}

create() {
	found=
	for candidate in $candidates; do
		if "$candidate" -c "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))" >/dev/null 2>&1; then
			found=$candidate
			break
		fi
	done
	test -n "$found" || fail "error: no Python 3.11 to 3.14 found (tried: $candidates)." \
		"Install one, or say where it is: make PYTHON=/path/to/python3.12"
	"$found" -c "import ensurepip, venv" >/dev/null 2>&1 || fail \
		"error: $found has no venv module, which creates the environment." \
		"Debian and Ubuntu: apt install python3-venv. Or name another: make PYTHON=/path/to/python3.12"
	echo "creating $venv with $("$found" --version)"
	"$found" -m venv --clear "$venv" || fail "error: $found could not create $venv; $(free .)."
}

"$venv/bin/python" -c "import pip" 2>/dev/null || create

pip="-m pip"
if [ -n "$stock" ]; then pip=requirements/stock_pip.py; fi
if [ -t 1 ]; then quiet=; else quiet=--quiet; fi

echo "installing the pinned packages of requirements/dev.txt (README.md: how much that is and how long it takes)"
pip install $quiet -r requirements/dev.txt "$@" || fail \
	"error: pip could not install requirements/dev.txt: its last lines above say which package, or why." \
	"Without a network, give pip a folder of wheels: make PIP_FLAGS='--no-index --find-links DIR'" \
	"On a full disk, make room: $(free .), $(free "${TMPDIR:-/tmp}");" \
	"    with a CPU build of torch it takes 2.1 GB here and 0.5 GB there, with PyPI's CUDA build 5.1 and 2.9 GB." \
	${stock:+"STOCK=1 takes packages from PyPI alone; without it pip follows the configuration of this machine."}
pip install --quiet --no-deps --no-build-isolation --editable . || exit 1
