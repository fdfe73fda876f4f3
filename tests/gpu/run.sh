#!/usr/bin/env bash
# Everything that only a GPU can prove, in under 8 minutes on one H200; one table last.
#
#   tests/gpu/run.sh [FOLDER OF CUBINS]
#
# Needs Python 3.12 with torch 2.11 or newer and numpy; cuda-bindings, which torch's CUDA builds
# bring, to launch and count. Needs neither TileLang nor pydantic, because the kernels come as cubins
# that were built beforehand, on any machine: python -m decodegrid.kernels.tile.build
# Without a GPU it says so and leaves with exit status 0; 1 where something failed, 2 where cubins
# are missing or what travels is over 40 MB (python -m tests.gpu.travel says how much it is).
#
# PYTHON   the Python to use
# SECONDS_MAX  how long the whole run may take
set -u
cd "$(dirname "$0")/../.."
cubins="${1:-build/cubins}"
exec "${PYTHON:-python3}" -m tests.gpu.main --cubins "$cubins" --seconds "${SECONDS_MAX:-450}"
