#!/bin/bash
# Process 1 of a host made of namespaces, which the caller has made:
#   host_init.sh NAME FOLDER SHARED...
# FOLDER holds what is the host's own; SHARED are folders that stay visible, read-only.
# It says "booted", waits for a line once its network is there, and says "serving".
set -eu
name=$1 folder=$2
shift 2

mount --make-rprivate /
hostname "$name"
for path in "$@"; do
    case $path in
    /tmp/*) # which is about to be hidden
        mkdir -p "$folder$path"
        mount --bind "$path" "$folder$path"
        mount -o remount,bind,ro "$folder$path" ;;
    *)
        mount --bind "$path" "$path"
        mount -o remount,bind,ro "$path" ;;
    esac
done
for own in /srv /etc/hosts /etc/passwd /etc/ssh; do
    mount --bind "$folder$own" "$own"
done
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/sshd
mount -t tmpfs -o mode=755 tmpfs /var/log
touch /var/log/lastlog /var/log/wtmp /run/utmp
mount -t tmpfs -o mode=1777,size=200m tmpfs /dev/shm
mount --rbind "$folder/tmp" /tmp
cd /srv

echo booted
read -r _
if [ -f /etc/ssh/sshd_config ]; then
    /usr/sbin/sshd -E /srv/sshd.log
fi
sleep infinity &
echo serving
# Until the power goes; bash reaps whatever loses its parent.
wait $!
