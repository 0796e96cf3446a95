#!/bin/sh
# TaskProlog= in slurm.conf, which runs it as the user before each task and sets in the task what it prints. Programs find
# the job's store by this. XCACHE=1 is left to the user; print it, too, to switch the cache on for everybody.
. /etc/slurm/xcache-settings.sh
echo "export XCACHE_DIR=$store"
echo "export XCACHE_REMOTE=$remote"
