# What all scripts of a lease share. LEASE is the folder on the GPU machine that holds everything.
export LEASE=${LEASE:-/tmp/lease} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export PYTHONPATH=$LEASE/code:$LEASE/site:$LEASE/vllm RLOO_CACHE=$LEASE/cache
export TORCHINDUCTOR_CACHE_DIR=$LEASE/inductor VLLM_CACHE_ROOT=$LEASE/vllm-cache
PYTHON=${LEASE_PYTHON:-python3}

# gpu "SIZES" ROW...: rows of bench/gpu.py, with other sizes than their own (KEY=VALUE ...) or "".
gpu() {
  local sizes=$1; shift
  [ -n "${LEASE_REHEARSE:-}" ] && sizes=
  $PYTHON "${LEASE_GPU:-$LEASE/code/bench/gpu.py}" ${LEASE_REHEARSE:+--rehearse} --minutes 7 \
    --raw "$LEASE/out/gpu.jsonl" --page "$LEASE/out/gpu.md" --keep "$LEASE/out/rows" \
    --rows "$@" ${sizes:+--set $sizes} >>"$LEASE/out/queue.txt" 2>&1 ||
    echo "lease: FAILED with $?: $*" >>"$LEASE/out/queue.txt"
}
