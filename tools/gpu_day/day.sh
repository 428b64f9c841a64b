#!/usr/bin/env bash
# Everything of value that a GPU can show, in at most END seconds, from the root of a checkout that need not be installed:
#
#     OUT=folder bash tools/gpu_day/day.sh              # all stages
#     OUT=folder STAGES="tests layer" bash tools/gpu_day/day.sh
#     OUT=folder DEV=cpu bash tools/gpu_day/day.sh      # a rehearsal; its times mean nothing
#
# Stages in the order of their value: facts, tests, layer, model, memcheck, racecheck. Each has its own limit, writes as it
# goes, and cannot stop the next one. WORKERS: processes of tests (8); MORE_TESTS: further files. A folder .whl of wheels that the machine lacks is installed beside, if there is one.
# In OUT: results.jsonl (every number), tests.xml, memcheck.txt, racecheck.txt, day.log.
set -u
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.." || exit 1
OUT=${OUT:?expected a folder in OUT, got none} END=${END:-540} DEV=${DEV:-cuda}
STAGES=${STAGES:-facts tests layer model memcheck racecheck}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false CUBLAS_WORKSPACE_CONFIG=:4096:8
site=$(mktemp -d)
if [ -d .whl ]; then
  python3 -m pip install -q --no-index --no-deps --no-cache-dir --target "$site" .whl/*.whl >>"$OUT/day.log" 2>&1
fi
PYTHONPATH=$(printf '%s:' "$PWD"/packages/*/src)$site:$here${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH

# stage NAME LIMIT LEAST COMMAND: run it for at most LIMIT seconds or what is left; skip it with less than LEAST left.
stage() {
  local name=$1 limit=$2 least=$3 left=$((END - SECONDS))
  shift 3
  [[ " $STAGES " == *" $name "* ]] || return 0
  if ((left < least)); then
    echo "[$SECONDS] stage $name: skipped, $left s left" | tee -a "$OUT/day.log"
    return 0
  fi
  ((limit < left)) || limit=$left
  echo "[$SECONDS] stage $name: at most $limit s" | tee -a "$OUT/day.log"
  SECONDS_LEFT=$((limit - 8)) timeout -k 5 "$limit" "$@" >>"$OUT/day.log" 2>&1
  echo "[$SECONDS] stage $name: exit code $?" | tee -a "$OUT/day.log"
}
run() { stage "$1" "$2" "$3" python3 "$here/run.py" "$1" --device "$DEV" --out "$OUT" "${@:4}"; }

hashcore=packages/hashcore/tests sparse=packages/sparse-decode/tests
pytest=(python3 -m pytest -q -p no:cacheprovider -W default -o addopts=--import-mode=importlib -m cuda --tb=short)
of_gpu=("$hashcore"/test_cuda.py "$sparse"/test_on_gpu.py packages/evals/tests/test_tasks.py packages/hashtrain/tests/test_cli.py)

run facts 40 5
[ "$DEV" = cpu ] || stage tests 150 20 "${pytest[@]}" -p pytest_lost_device -n "${WORKERS:-8}" --dist worksteal --max-worker-restart=30 \
  --maxfail=40 --durations=5 --junitxml="$OUT/tests.xml" "${of_gpu[@]}" ${MORE_TESTS:-}
run layer 130 25 ${SIZES:+--sizes $SIZES}
run model 130 40
small="(test_searches_of_any_length and 2049 and weights0) or (test_equals_the_cpu and 600-7-kind0) or \
(test_hashed_tokens and transform-64 and True) or (test_steps_are_those and dtype0-True-True)"
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
if [ "$DEV" = cuda ]; then
  for tool in memcheck racecheck; do # the driver's own look-ups return errors that mean nothing
    stage $tool 90 30 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool $tool --report-api-errors no \
      --error-exitcode 86 --log-file "$OUT/$tool.txt" "${pytest[@]}" "${of_gpu[@]}" -k "$small"
  done
fi
python3 "$here/run.py" summary --out "$OUT" | tail -c 11500
