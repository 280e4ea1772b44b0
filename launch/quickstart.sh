#!/usr/bin/env bash
# bash launch/quickstart.sh [--steps N] [ARGUMENT OF PRETRAIN.PY…]
#
# Pretrains a small Llama on the State of the Union addresses on 4 CPU ranks (TP 2 × DP 2, sequence parallelism, ZeRO-2),
# plots its loss, exports it for Hugging Face, evaluates it and prints a sample. Run again, it resumes.
# It trains 150 steps. --steps 600 gives a better model and takes about four more minutes on 2 cores.
# Example: bash launch/quickstart.sh --steps 600 --set zero_tp.training.seed=1
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1-} in -h | --help)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "launch/quickstart.sh"
    exit 0
    ;;
esac

steps=150
if [ "${1-}" = --steps ]; then
    if ! [[ ${2-} =~ ^[1-9][0-9]*$ ]]; then
        echo "error: --steps: ${2:-nothing} is not a positive number" >&2
        exit 2
    fi
    steps=$2
    shift 2
fi
data=data/quickstart
run=runs/quickstart
export_=exports/quickstart
result=$run/evaluation.json
step=0
durations=()

begin() {
    step=$((step + 1))
    title=$1
    started=$SECONDS
    printf '\n[%d/7] %s\n' "$step" "$title"
}
end() {
    durations+=("$((SECONDS - started)) s  $title")
    printf '[%d/7] %s: %d s\n' "$step" "$title" $((SECONDS - started))
}

# A launcher that gets a signal may leave its ranks running. It gets its own process group (set -m), so that `stop` can
# signal the launcher and all ranks, and kill those that are still running after 10 seconds.
group=
stop() {
    trap - INT TERM HUP
    if [ -n "$group" ]; then
        kill -TERM -- "-$group" 2>/dev/null || true
        for _ in $(seq 100); do
            kill -0 -- "-$group" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL -- "-$group" 2>/dev/null || true
    fi
    exit "$1"
}
trap 'stop 130' INT
trap 'stop 143' TERM HUP
in_group() {
    set -m
    "$@" </dev/null &
    group=$!
    set +m
    local status=0
    wait "$group" || status=$?
    group=
    return "$status"
}

begin "Set-up"
in_group bash launch/setup_env.sh plot
export PATH="$PWD/.venv/bin:$PATH"
end
set_up=$SECONDS

# Four ranks share the cores; more than one thread per rank slows all of them down.
export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false

begin "Corpus and tokenizer"
in_group python launch/prepare_data.py --input launch/corpus/sotu.jsonl.gz --tokenizer bpe:4096 --output "$data"
end

begin "Pretraining on 4 ranks"
# The launcher's default port is fixed, so a second run on this machine could not start.
port=$(python -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
in_group deepspeed --num_accelerators 4 --master_port "$port" --log_level error launch/pretrain.py \
    --deepspeed_config ds_configs/quickstart.json --output-dir "$run" --set "zero_tp.training.steps=$steps" "$@"
end

# Each of the next steps is one process, which may use all cores.
unset OMP_NUM_THREADS

begin "A picture of the run"
in_group zero-tp report "$run"
end

begin "Export for Hugging Face"
in_group python launch/convert.py to-hf "$run" --output "$export_" --overwrite
end

begin "Perplexity of held-out addresses"
in_group python eval/zero_shot.py --model "$export_" --tasks perplexity --data perplexity="$data/validation.jsonl" \
    --output "$result"
end

begin "A sample"
in_group python launch/sample.py --model "$export_" --prompt "My fellow citizens, the state of our Union"
end

printf '\nTime of each part:\n'
printf '%8s\n' "${durations[@]}"
echo "$SECONDS s together, $((SECONDS - set_up)) s of them after the set-up"

cat <<END

Written, in $PWD:
  $data/     corpus, tokenizer, report.json
  $run/     config.json, metrics.jsonl, checkpoints/; report.html, report_curves.png: its curves
  $result     perplexity of the held-out addresses
  $export_/  the model: AutoModelForCausalLM.from_pretrained("$export_")
END
