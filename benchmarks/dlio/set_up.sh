#!/bin/sh
# Set up DLIO, the storage industry's benchmark of deep-learning I/O, in benchmarks/.cache/dlio: an environment of its own
# beside that of the checkout, whose PyTorch and Penstock it uses. Run it from the root of the checkout.
#
# DLIO asks for TensorFlow and DALI, which nothing here runs: without dependencies it takes a module by that name.
set -eu
into=benchmarks/.cache/dlio
[ -x .venv/bin/python ] || { echo "make test sets up .venv, which this builds on: run it first" >&2; exit 1; }
.venv/bin/python -m venv "$into"
site=$("$into/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Through site.addsitedir, so that the editable checkout is found, too.
echo "import site; site.addsitedir('$own')" > "$site/checkout.pth"
"$into/bin/pip" install --quiet --no-deps dlio_benchmark==2.0.0
"$into/bin/pip" install --quiet hydra-core==1.3.2 pydftracer==1.0.2 h5py pandas psutil pyyaml
# mpi4py looks for MPI in the environment it is in.
"$into/bin/pip" install --quiet --ignore-installed --no-deps mpich mpi4py
mkdir -p "$site/tensorflow"
: > "$site/tensorflow/__init__.py"
"$into/bin/python" -c 'import dlio_benchmark, torch, penstock; print("ready:", torch.__version__)'
