
# Made by dtf; what it runs is in bundle.zip beside it. It decides by what dtf's processes said whether the run is done,
# has failed, or starts again, and is the only one that requeues the job.
umask 077
folder=@FOLDER@
runs=(@RUNS@)
tasks=@TASKS@
run=${runs[${SLURM_ARRAY_TASK_ID:-0}]}
id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
id=${id:-$SLURM_JOB_ID}
part=${SLURM_ARRAY_TASK_ID:+.$SLURM_ARRAY_TASK_ID}
restart=${SLURM_RESTART_COUNT:-0}

told= heard=
trap 'told=1 heard=1' TERM
trap 'heard=1' USR1 USR2 HUP INT

say() { echo "dtf: $(date +%FT%T) job $id: $*"; }

# behind what the job is known by, until its number is recorded
show() { scontrol update JobId="$id" Comment="@COMMENT@ $*" 2>/dev/null; }

note() { # state, exit code, text: for job=status, when Slurm has forgotten the job
    echo "$1 $2 $id $3" >"$folder/.ended$part" && mv "$folder/.ended$part" "$folder/ended$part"
}

finish() { # as note; the end of the job
    say "$1: $3"
    note "$1" "$2" "$3"
    show "$3"
    exit "$2"
}

cancelled() { # listed: a shared file system may remember for a while that a file was not there
    local path
    for path in "$folder"/*; do [[ $path == "$folder/cancel" ]] && return 0; done
    return 1
}

newest() { # the step of the newest checkpoint, 0 without one
    local best=0 step
    for step in "$run"/checkpoints/step_*; do
        step=${step##*/step_}
        [[ $step =~ ^[0-9]+$ ]] && ((10#$step > best)) && best=$((10#$step))
    done
    echo "$best"
}

began() { # whether srun has started a task
    local path
    for path in "$attempt"/began.*; do [[ -e $path ]] && return 0; done
    return 1
}

# What srun itself has printed in this start, without the names of its programs: the last of what is in the job's log.
words_of_srun() {
    local log=/proc/$$/fd/2 text
    [[ -f $log ]] || return 0
    text=$(tail -c 16000 "$log" | tr -d '\0')
    text=${text##*": start $restart on "}
    sed -nE 's/^(srun|slurmstepd[^:]*): ((error|fatal): )?//p' <<<"$text" | head -n 8 | paste -sd ';' | head -c 400
}

# What srun says where its arguments are wrong, so that it would say so again at each start.
mistakes="unrecognized|option '.*' (is ambiguous|requires)|Failed to parse|More processors requested"
mistakes+="|Invalid (--|MPI type|generic resource|node name|numeric value|feature|time)"
mistakes+="|pyxis: .*(No such file|nvalid|error code: 40[0-4])"

# What became of the run, by the exit codes of its processes. `failed` where one failed for good; else `lost` where a
# machine or a process was, one that left no code among them; else `stopped` where one was asked to; else `done`.
judge() {
    local task code now tries=30
    verdict=done decisive=0 exit_code=0
    ((step_code == 0)) && return # srun ends with the highest code
    for ((task = 0; task < tasks; task++)); do
        code=$(cat "$attempt/code.$task" 2>/dev/null)
        while [[ -z $code ]] && ((step_code < 128 && tries-- > 0)); do # another node's file may be seen late
            sleep 1
            code=$(cat "$attempt/code.$task" 2>/dev/null)
        done
        [[ -z $code && $step_code == 143 ]] && code=143
        # no task could note its code, as in a full folder: srun's own is the highest of them, and 1 where srun failed
        [[ -z $code ]] && ((step_code > 1 && step_code < 128)) && ! compgen -G "$attempt/code.*[0-9]" >/dev/null &&
            code=$step_code
        case $code in
        0) continue ;;
        @ALWAYS@) now=stopped ;;
        @FINAL@) now=failed ;;
        *) now=lost ;; # dtf says so, or was killed
        esac
        case $verdict-$now in
        failed-* | lost-stopped | lost-lost | stopped-stopped) ;;
        *) verdict=$now decisive=$task exit_code=${code:-69} ;;
        esac
    done
}

may_go_on() { # after a loss: unless there were @MOST@ without a new checkpoint
    local count=0 before='' by='' now
    now=$(newest)
    [[ -f $folder/lost$part ]] && read -r count before by <"$folder/lost$part"
    # the number is not trusted; another job's losses were those of another submission
    [[ $count =~ ^[0-9]$ && $before == "$now" && $by == "$id" ]] || count=0
    # on a full disk no loss can be counted: then each start of the job counts as one
    echo "$((++count)) $now $id" 2>/dev/null >"$folder/lost$part" || count=$((restart + 1))
    ((count < @MOST@))
}

attempt=$folder/attempts/$id.$restart
mkdir -p "$attempt" && rm -f "$attempt"/*
rm -f "$folder/ended$part"
# what this job is follows from Slurm alone
unset DTF_NODES DTF_NODE DTF_ADDRESS DTF_ROLE DTF_ID DTF_ENDPOINTS DTF_RESTARTS DTF_DEADLINE
deadline=${SLURM_JOB_END_TIME:-}
if [[ -z $deadline && $(scontrol show job -o "$id" 2>/dev/null) =~ EndTime=([0-9T:-]+) ]]; then
    deadline=$(date --date="${BASH_REMATCH[1]}" +%s 2>/dev/null)
fi
[[ -n $deadline ]] && export DTF_DEADLINE=$deadline
export DTF_JOB=$id DTF_ATTEMPT=$attempt DTF_ROLES=@ROLES@
say "start $restart on $SLURM_JOB_NODELIST, newest checkpoint: step $(newest)"
step_code=143
before=$attempt/before-srun # there until srun runs; the line of launcher.setup that runs
if [[ -z $told ]] && ! cancelled; then
    : >"$before"
    ( # what launcher.setup does to its shell ends with the step
        _dtf_line=$before
        _dtf_check() { (($1 == 0)) || exit "$1"; }
@SETUP@
        rm -f "$_dtf_line"
        exec srun @SRUN@
    ) &
    step=$!
    heard=1
    while [[ -n $heard ]]; do # a signal ends the wait, not the step
        heard=
        [[ -n $told && -e $before ]] && kill -TERM "$step" 2>/dev/null
        wait "$step"
        step_code=$?
    done
    ((step_code >= 0)) || step_code=143 # bash lost it: the step ended by the signal that interrupted the wait
    if [[ -e $before && -z $told ]]; then
        finish failed 2 "a line of launcher.setup ended with $step_code: $(<"$before")"
    elif [[ -e $before ]]; then
        step_code=143
    fi
fi

judge
words= reason=$(head -c 400 "$attempt/reason.$decisive" 2>/dev/null | tr -s '\n' ' ')
if ((step_code != 0)) && [[ -z $told ]] && ! began; then # judge has waited for files that are seen late
    words="srun started no task and ended with $step_code: $(words_of_srun)"
    [[ $words =~ $mistakes ]] && finish failed 2 "$words; correct launcher.srun"
    reason=${reason:-$words}
fi
((exit_code == 127)) && reason=${reason:-"there is no such interpreter on the node: give launcher.python"}
case $verdict in
done) finish finished 0 "newest checkpoint: step $(newest)" ;;
failed) finish failed "$exit_code" "${reason:-a process of the run ended with $exit_code}" ;;
esac
if cancelled; then
    say "cancelled: $verdict, newest checkpoint: step $(newest)"
    note cancelled "$exit_code" cancelled
    scancel "$id"
    sleep 60
    exit "$exit_code"
fi
# Slurm ends the whole job. At its time limit, and where a cluster cancels what it preempts, it starts again all the same,
# and where this script has heard a signal alone (scancel --batch --signal); after scancel, or where Slurm requeues it by
# itself, that is not for this script to decide
ended=' Reason=TimeLimit | PreemptTime=[0-9]| JobState=RUNNING '
if [[ -n $told && ! $(scontrol show job -o "$id" 2>/dev/null) =~ $ended ]]; then
    say "ended from outside: $verdict, newest checkpoint: step $(newest)"
    exit "$exit_code"
fi
if [[ $verdict == lost ]] && ! may_go_on; then
    finish failed "$exit_code" "lost again and again without a new checkpoint; ${reason:-srun ended with $step_code}"
fi
say "$verdict, exit code $exit_code, newest checkpoint: step $(newest); starts again"
show "$verdict, starts again from step $(newest). ${reason%%; start again *}"
for ((tries = 60; tries > 0; tries--)); do
    refused=$(scontrol requeue "$id" 2>&1) && break
    say "scontrol requeue failed: $refused"
    shown=$(scontrol show job -o "$id" 2>/dev/null | head -n 1)
    [[ -n $shown && $shown != *" JobState=RUNNING "* ]] && break # Slurm has requeued it by itself
    if [[ -n $shown ]] || ((tries == 1)); then
        refused="and Slurm does not start it again: $refused; submit it again"
        finish failed "$exit_code" "$verdict at step $(newest), $refused"
    fi
    sleep 30 # the controller is away
done
sleep 60 # a script that ends here would make the job COMPLETED or FAILED
exit "$exit_code"
