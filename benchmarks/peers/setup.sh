#!/usr/bin/env bash
# Installs one peer into an environment of its own, from pinned versions; never into ours.
#   benchmarks/peers/setup.sh PEER [ENVDIR]     PEER: tunix transformers llama_cpp vllm trl
# Default ENVDIR: .venv-peers/PEER. PYTHON picks the interpreter (the pins were tried with Python 3.11 on x86-64 Linux).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
peers="tunix transformers llama_cpp vllm trl"
peer=${1:-}
if [[ " $peers " != *" ${peer:-none} "* ]]; then
    echo "setup.sh: got '$peer', expected one of: $peers" >&2
    exit 2
fi
env_dir=${2:-$here/../../.venv-peers/$peer}
python=${PYTHON:-python3.11}

"$python" -m venv --clear "$env_dir"
pip=("$env_dir/bin/python" -m pip --disable-pip-version-check)
if [[ $peer == llama_cpp ]]; then
    # Built from source (C++ compiler and cmake; 10 to 20 minutes on two cores) for this machine's CPU, without the image tools.
    export CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF ${CMAKE_ARGS:-}"
fi
# --no-deps: the lock is complete. That also leaves out what a package asks for and text models do not use (see README.md).
"${pip[@]}" install --quiet --no-deps -r "$here/locks/$peer.txt"
touch "$env_dir/.peer-ready"
echo "$peer: $env_dir"
