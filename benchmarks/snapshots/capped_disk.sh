#!/bin/sh
# A disk that writes at most so many bytes a second, mounted on a folder: a file as a loop device, throttled by the
# kernel (cgroup v1, blkio), so that the cap is the same for whoever writes, and comes down on fsync as a disk's does.
#
#     sh benchmarks/snapshots/capped_disk.sh FOLDER [MIB_PER_SECOND [MIB]]    (default: 100, 6144)
#     sh benchmarks/snapshots/capped_disk.sh --remove FOLDER
#
# Needs root, e2fsprogs and a kernel with loop devices and the first blkio controller.
set -eu
throttle=/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device

if [ "$1" = "--remove" ]; then
    device="$(findmnt -n -o SOURCE "$2")"
    echo "$(lsblk -n -d -o MAJ:MIN "$device" | tr -d ' ') 0" >"$throttle"
    umount "$2"
    losetup -d "$device"
    rm -f "$2.disk"
    rmdir "$2"
    exit
fi

folder="$1"
mkdir "$folder"
truncate -s "${3:-6144}M" "$folder.disk"
device="$(losetup -f --show "$folder.disk")"
mkfs.ext4 -q "$device"
mount "$device" "$folder"
echo "$(lsblk -n -d -o MAJ:MIN "$device" | tr -d ' ') $((${2:-100} * 1048576))" >"$throttle"
