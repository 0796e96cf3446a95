#!/bin/sh
# Prolog= in slurm.conf, which runs it as root on each node of a job, before the job begins. It makes a store for the job
# on the node's disk, and starts the daemon of the job's user, which fetches what programs ask for from the user's shared
# folder. A prolog that fails drains the node, so this one never does: without the daemon the programs compile.
. /etc/slurm/xcache-settings.sh
cd / || exit 0
install -d -m 711 "$stores" && install -d -m 700 -o "$SLURM_JOB_UID" "$store"
as_user 10 sh -c 'umask 077 && mkdir -p "$1"' - "$shared"
as_user 30 "$xcache" start
exit 0
