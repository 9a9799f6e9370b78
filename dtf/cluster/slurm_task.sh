#!/bin/bash
# Made by dtf: one task of the job. Slurm sends its signals to dtf's processes too; this shell outlives them.
told= heard=
trap 'told=1 heard=1' TERM
trap 'heard=1' USR1 USR2 HUP INT
folder=@FOLDER@
cancelled() { # listed: a shared file system may remember for a while that a file was not there
    local path
    for path in "$folder"/*; do [[ $path == "$folder/cancel" ]] && return 0; done
    return 1
}
ends_all() { # by the exit code of one task, which failed or was lost: the others would wait for it
    case $1 in
    0 | @ALWAYS@) return 1 ;;
    esac
}
ended() { # whether a task has ended all
    local path
    for path in "$DTF_ATTEMPT"/code.*; do
        [[ -e $path && $path != *.new ]] && ends_all "$(<"$path")" && return 0
    done
    return 1
}
: >"$DTF_ATTEMPT/began.$SLURM_PROCID" # what failed before is srun's
watch_leader() { # where the node of the batch script is lost Slurm requeues that component, and leaves this one its nodes
    local theirs
    while ! read -rt @ASKED@; do # nothing ever comes: a wait
        theirs=$(squeue --noheader --jobs="$DTF_JOB" --format="%A %T" 2>/dev/null)
        # says that the job is pending, and requeues what still runs of it all the same
        [[ $'\n'$theirs == *$'\n'"$DTF_JOB PENDING"* ]] && scontrol requeue "$DTF_JOB" 2>/dev/null
    done <> <(:)
}
watch=
if [[ -n ${SLURM_HET_SIZE:-} && ${SLURM_NODEID:-0} != 0 && ${SLURM_LOCALID:-0} == 0 ]]; then
    watch_leader &
    watch=$!
fi
export DTF_REASON_FILE=$DTF_ATTEMPT/reason.$SLURM_PROCID
code=143
# it may have come before Slurm knew of this task, which a signal did not reach then
if [[ -z $told ]] && ! cancelled && ! ended; then
    @COMMAND@ &
    process=$!
    [[ -n $told ]] && kill -TERM "$process" # it came in between
    heard=1
    while [[ -n $heard ]]; do
        heard=
        wait "$process"
        code=$?
    done
    ((code >= 0)) || code=143 # bash lost it: the process ended by the signal that interrupted the wait
fi
[[ -z $watch ]] || kill "$watch"
noted=$DTF_ATTEMPT/code.$SLURM_PROCID
echo "$code" >"$noted.new" && mv "$noted.new" "$noted"
if ends_all "$code" && command -v scancel >/dev/null; then
    scancel --signal=TERM "$DTF_JOB" # not the step: that of another component has another number
fi
exit "$code"
