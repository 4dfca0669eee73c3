#!/bin/sh
# Makes the environments that benchmarks/loader/images.py, shards.py, tables.py and objects.py compare with, below benchmarks/.cache.
# Needs Debian's libturbojpeg0-dev, libopencv-dev, pkg-config and g++ (FFCV is compiled), 6 GB of disk,
# and network.
set -eu
cache="$(dirname "$0")/../.cache"
python="${PYTHON:-python3}"
mkdir -p "$cache"

if [ ! -x "$cache/ffcv/bin/python" ]; then
    "$python" -m venv "$cache/ffcv"
    "$cache/ffcv/bin/pip" install -q torch==2.13.0
    "$cache/ffcv/bin/pip" install -q "setuptools<81" wheel numpy numba opencv-python-headless fastargs \
        assertpy pandas tqdm psutil terminaltables pillow
    "$cache/ffcv/bin/pip" install -q --no-deps --no-build-isolation ffcv==1.0.2
fi

if [ ! -x "$cache/dali/bin/python" ]; then
    "$python" -m venv "$cache/dali"
    "$cache/dali/bin/pip" install -q numpy nvidia-dali-cuda120==2.4.0
fi

if [ ! -x "$cache/webdataset/bin/python" ]; then
    "$python" -m venv "$cache/webdataset"
    "$cache/webdataset/bin/pip" install -q torch==2.13.0 webdataset==1.0.2 numpy numba opencv-python-headless simplejpeg
fi

if [ ! -x "$cache/tables/bin/python" ]; then
    "$python" -m venv "$cache/tables"
    "$cache/tables/bin/pip" install -q torch==2.13.0 torchvision==0.28.0 numpy mosaicml-streaming==0.13.0 tfrecord==1.14.6 \
        litdata==0.2.76 s3torchconnector==1.5.0
fi

# Streaming imports two names of torchvision, for sets of pictures that no benchmark reads. PyPI's torchvision cannot be
# imported beside a torch without CUDA: two such names stand in for it.
if ! "$cache/tables/bin/python" -c "import torchvision" 2>/dev/null; then
    "$cache/tables/bin/pip" uninstall -q -y torchvision
    site="$("$cache/tables/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")"
    mkdir -p "$site/torchvision/transforms"
    touch "$site/torchvision/__init__.py" "$site/torchvision/transforms/__init__.py"
    echo "class VisionDataset: pass" >"$site/torchvision/datasets.py"
    echo "def to_tensor(picture): raise NotImplementedError" >"$site/torchvision/transforms/functional.py"
fi
