#!/usr/bin/env bash
# Installs turbo_gnn and anemoi-models beside the measured library, offline, without
# their dependencies. turbo_gnn is compiled by nvcc, for this machine's GPU alone, which
# takes some minutes: with a third argument the wheel is kept there, and used again.
#
#   benchmarks/setup_peers.sh TURBO_GNN_SDIST ANEMOI_MODELS_WHEEL [WHEEL_FOLDER]
#
# PYTHON names the interpreter (default: python3), PIP_TARGET a folder to install into,
# which then belongs on PYTHONPATH.
set -euo pipefail

if [[ $# -lt 2 || $# -gt 3 ]]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
sdist=$1
anemoi=$2
wheels=${3:-$(mktemp -d)}
python=${PYTHON:-python3}
options=(--no-index --no-deps --disable-pip-version-check)

mkdir -p "$wheels"
if ! compgen -G "$wheels/turbo_gnn-*.whl" >/dev/null; then
    arch=$("$python" -c 'import torch
print("{}.{}".format(*torch.cuda.get_device_capability()))')
    # Without this its build looks for a ready wheel on the network first.
    export TURBO_GNN_FORCE_BUILD=TRUE
    export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$arch}
    export MAX_JOBS=${MAX_JOBS:-$(nproc)}
    "$python" -m pip wheel "${options[@]}" --no-build-isolation -w "$wheels" "$sdist"
fi
export PYTHONPATH=${PIP_TARGET:+$PIP_TARGET:}${PYTHONPATH:-}
"$python" -m pip install "${options[@]}" "$wheels"/turbo_gnn-*.whl "$anemoi"
"$python" -c 'import turbo_gnn
from anemoi.models.triton import gt, utils
print("turbo_gnn from", turbo_gnn.__file__)
print("anemoi from", gt.__file__)'
