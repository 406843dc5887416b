#!/bin/sh
# How a host of the lab starts. Both halves get all they need as arguments. Few programs are run,
# and all mounts are made by one: 64 hosts start at once.
set -eu

case $1 in
launch) # CGROUP NETNS LOG NAME DISK SSHD: puts the host into its cgroup and network, and returns
    cgroup=$2 netns=$3 log=$4
    shift 4
    echo $$ >"$cgroup/cgroup.procs"
    exec </dev/null >>"$log" 2>&1
    # /run/netns: as `ip netns` names them.
    nsenter --net="/run/netns/$netns" \
        unshare --mount --uts --ipc --pid --fork --kill-child=KILL sh "$0" boot "$@" &
    ;;
boot) # NAME DISK SSHD: process 1 of the host; makes its file systems and becomes sshd
    name=$2 disk=$3 sshd=$4
    echo "$name" >/proc/sys/kernel/hostname
    cd "$disk" # the overlay's options are relative to it: paths in them could hold no commas
    mount --all --fstab fstab
    cd root
    mount -o remount,bind,rw proc/sys/net
    mkdir -m 755 run/sshd
    mkdir -m 1777 run/lock
    pivot_root . . # the old root now lies on the new one,
    umount -l .    # and goes
    cd /
    # A host must not set the machine's clock or load modules into its kernel.
    exec setpriv --bounding-set=-sys_time,-sys_module,-sys_rawio "$sshd" -D -e
    ;;
esac
