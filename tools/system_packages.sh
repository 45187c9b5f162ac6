#!/bin/sh
# Debian packages that pip cannot bring. Installed only as root and only when missing; where that is not
# possible the work goes on, and says what will be slower or skipped.
#   system_packages.sh [venv PYTHON] [openblas] [chromium]
set -u

say() { printf '\n*** %s\n\n' "$*" >&2; }

have() {
    case $1 in
        venv) "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ;;
        openblas) [ -n "${MOELAB_OPENBLAS:-}" ] || "${python:-python3}" -c \
            'import ctypes.util, sys; sys.exit(not ctypes.util.find_library("openblas"))' ;;
        chromium) command -v chromium >/dev/null 2>&1 ;;
    esac
}

package() {
    case $1 in
        venv) echo "python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv" ;;
        openblas) echo libopenblas0-pthread ;;
        chromium) echo chromium ;;
    esac
}

consequence() {
    case $1 in
        venv) echo "python's venv module is incomplete: install $(package venv), then run make again" ;;
        openblas) echo "no OpenBLAS: prefill on the CPU runs several times slower (install $(package openblas))" ;;
        chromium) echo "no chromium: the browser tests will be skipped (install $(package chromium))" ;;
    esac
}

[ "$(uname -s)" = Linux ] || exit 0
python=
missing=
while [ $# -gt 0 ]; do
    what=$1
    shift
    if [ "$what" = venv ]; then
        python=$1
        shift
    fi
    have "$what" || missing="$missing $what"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    packages=
    for what in $missing; do packages="$packages $(package "$what")"; done
    say "installing$packages"
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086  # a list of package names is meant to be split
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends $packages; } </dev/null >&2 ||
        say "apt-get could not install$packages"
fi
for what in $missing; do
    have "$what" || say "$(consequence "$what")"
done
exit 0
