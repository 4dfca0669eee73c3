#!/bin/sh
# Makes an environment with what compare_codecs.py and compare_saves.py compare with, in a folder:
#
#     sh benchmarks/snapshots/set_up_peers.sh [FOLDER]       (default: benchmarks/.cache/snapshot-peers)
#
# PYTHON names the interpreter of the environment that has Penstock (default: python3). Whatever that environment has
# (PyTorch, NumPy) is used and not installed again. 0.5 GB of disk, and network.
set -eu
folder="${1:-$(dirname "$0")/../.cache/snapshot-peers}"
python="${PYTHON:-python3}"

if [ ! -x "$folder/bin/pip" ]; then
    "$python" -m venv "$folder"
fi
ours="$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
theirs="$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
echo "$ours" >"$theirs/penstock-environment.pth"
torch="$("$python" -c 'import torch; print(torch.__version__.split("+")[0])')"
"$folder/bin/pip" install -q zipnn==0.5.4 pcodec==1.1.0 blosc2==4.14.1 zstandard==0.25.0 \
    orbax-checkpoint==0.12.8 "torch==$torch"
