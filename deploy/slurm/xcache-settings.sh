# Read by prolog.sh, epilog.sh and task-prolog.sh: where things are on your cluster.

# An installation of root's, with the extra remote.
xcache=/opt/xcache/bin/xcache
# On a disk of the node.
stores=/local/xcache
store=$stores/$SLURM_JOB_ID
# On the network file system, made by the user and of no use to others: whoever can write there can run code as the user.
home=$(getent passwd "$SLURM_JOB_USER" | cut -d : -f 6)
shared=$home/.cache/xcache-shared
remote="file://$shared?trust=tier"

# Run a command as the job's user, with nothing of root's environment.
as_user() {
    runuser -u "$SLURM_JOB_USER" -- env -i HOME="$home" PATH=/usr/bin:/bin \
        XCACHE_DIR="$store" XCACHE_REMOTE="$remote" timeout "$@"
}
