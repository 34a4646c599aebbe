# Sourced by the other scripts: makes .venv if there is none, and installs into it at the versions of constraints.txt.

if [ ! -x .venv/bin/python ]; then
    if ! "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "The pinned versions need Python 3.11 or newer; name one with PYTHON=..." >&2
        exit 1
    fi
    "${PYTHON:-python3}" -m venv .venv
fi

install() {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$@"
}
