#!/usr/bin/env bash
# bash launch/setup_env.sh [--newest] [EXTRA…]   (data, datatrove, dev, eval, plot)
#
# Makes .venv in the repository, installs zero_tp with these extras at the versions of constraints.txt, and compiles the
# DeepSpeed ops of a CPU run. Parts that are up to date are left alone. PYTHON chooses the interpreter of a new .venv.
# --newest makes .venv-newest instead, with the newest releases of the day, whatever constraints.txt and setup.cfg allow.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$repository"
name=.venv
newest=
if [ "${1:-}" = --newest ]; then newest=$(date +%F); name=.venv-newest; shift; fi
extras=$(IFS=,; echo "$*")
environment=$repository/$name
log=$environment/setup.log

fail() {
    echo "set-up: $1" >&2
    exit 1
}

# Two commands in one clone wait for each other.
exec 9<"$repository/launch/setup_env.sh"
if command -v flock >/dev/null; then flock 9; fi

if ! "$environment/bin/python" -m pip --version >/dev/null 2>&1; then
    base=${PYTHON:-python3}
    command -v "$base" >/dev/null || fail "there is no $base: install Python 3.11 or newer, or name one with PYTHON=…"
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$("$base" --version 2>&1) is too old: Python 3.11 or newer is needed; name one with PYTHON=…"
    "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$base has no venv module: install it (Debian, Ubuntu: apt-get install python3-venv)"
    echo "set-up: making $name with $("$base" --version 2>&1)"
    # --clear: an interrupted attempt may have left half of one.
    "$base" -m venv --clear "$environment"
fi
python=$environment/bin/python
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$name has $("$python" --version): remove it, Python 3.11 or newer is needed"

key=$({ cat constraints.txt setup.cfg setup.py pyproject.toml tests/packages.txt && "$python" --version && pwd; } | cksum)
key="$key${newest:+ $newest}"
installed() { # without extras, an earlier set-up with any extras will do
    for stamp in "$environment/installed-$extras" ${extras:-"$environment"/installed-*}; do
        if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then return 0; fi
    done
    return 1
}
install() {
    if [ -z "$newest" ]; then
        # Build environments need the constraints too: the first variable is for pip before 25.3, the second from 25.3.
        PIP_CONSTRAINT=$repository/constraints.txt PIP_BUILD_CONSTRAINT=$repository/constraints.txt \
            "$python" -m pip install --no-compile -c constraints.txt -e ".${extras:+[$extras]}"
        return
    fi
    # By name: setup.cfg's bounds would hold releases back.
    local packages
    packages=$("$python" - "$extras" <<'END'
import configparser, re, sys
config = configparser.ConfigParser()
config.read("setup.cfg")
lists = [config["options"]["install_requires"]]
lists += [config["options.extras_require"][extra] for extra in sys.argv[1].split(",") if extra]
print(*sorted({re.match(r"[\w-]+", line)[0] for text in lists for line in text.strip().splitlines()}))
END
    ) || return
    # shellcheck disable=SC2086
    "$python" -m pip install --no-compile --upgrade --upgrade-strategy eager setuptools $packages &&
        "$python" -m pip install --no-compile --no-deps --no-build-isolation -e .
}
write() { # the whole file or none of it
    cat >"$1.new" && mv "$1.new" "$1"
}

if ! installed; then
    echo "set-up: installing zero_tp${extras:+[$extras]} into $name, some minutes (messages: $name/setup.log)"
    begin=$SECONDS
    # --no-compile: compiling 18,000 files takes a third of the time, and a run imports a fifth of them. The import below
    # compiles those once, so that ranks that start together do not.
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    install >"$log" 2>&1 ||
        { tail -n 20 "$log" >&2; fail "pip failed; all its messages are in $log"; }
    case ,$extras, in *,dev,*)
        "$python" -m pip install --no-compile --no-deps -r tests/packages.txt >>"$log" 2>&1 ||
            { tail -n 20 "$log" >&2; fail "pip failed; all its messages are in $log"; } ;;
    esac
    env -u PYTHONDONTWRITEBYTECODE DS_ACCELERATOR=cpu "$python" -c 'import zero_tp.run.start, zero_tp.run.loop' >>"$log" 2>&1 ||
        { tail -n 20 "$log" >&2; fail "what was installed can't be imported; all messages are in $log"; }
    write "$environment/installed-$extras" <<<"$key"
    echo "set-up: installed in $((SECONDS - begin)) s"
fi

# The tests use two ops that DeepSpeed compiles, its Adams. They are compiled here, because ranks that start together would
# all wait for one compiler, and time out on a slow machine. Nothing else on CPUs needs a compiler.
case ,$extras, in *,dev,*) ;; *) exit 0 ;; esac
builders="CPUAdamBuilder FusedAdamBuilder"
# Not in a home's cache, where another project's build may have left anything.
export TORCH_EXTENSIONS_DIR=$environment/torch_extensions
ops=$environment/ops
current_ops() {
    [ -f "$ops" ] && [ "$(head -n 1 "$ops")" = "$key" ] || return 1
    while read -r file; do [ -f "$file" ] || return 1; done < <(tail -n +2 "$ops")
}
if ! current_ops; then
    compiler=${CXX:-c++}
    command -v "${compiler%% *}" >/dev/null || # "ccache g++" has two words
        fail "there is no C++ compiler ($compiler): install one (Debian, Ubuntu: apt-get install g++) or set CXX"
    "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
        fail "Python's headers are missing: install them (Debian, Ubuntu: apt-get install python3-dev)"
    echo "set-up: compiling DeepSpeed's $builders, some minutes"
    begin=$SECONDS
    # shellcheck disable=SC2086
    files=$(DS_ACCELERATOR=cpu PATH="$environment/bin:$PATH" "$python" launch/compile_ops.py --log "$log" $builders) ||
        { tail -n 20 "$log" >&2; fail "compiling failed; all messages are in $log"; }
    write "$ops" <<<"$key"$'\n'"$files"
    echo "set-up: compiled in $((SECONDS - begin)) s"
fi
