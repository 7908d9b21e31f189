# Call 3: the rest; unpack SmolLM2 and vLLM on the cores that the queues leave free.
. "${LEASE:-/tmp/lease}/scripts/env.sh"
here=$(cd "$(dirname "$0")" && pwd)
cp "$here"/piece.* "$LEASE/pieces/"
cd "$LEASE/pieces" && sha256sum --quiet --check "$here/pieces.sha256" || exit 1
mkdir -p "$LEASE/wheels" "$LEASE/vllm"
cat piece.* | tar x -C "$LEASE/wheels"
cd "$LEASE/code"
PIP_NO_INDEX=1 PIP_FIND_LINKS=$LEASE/wheels $PYTHON -m rloo_cli fetch +recipe=smollm2_arithmetic
tar xJf "$LEASE/wheels/engine.tar.xz" -C "$LEASE/vllm"
taskset -c 8-15 $PYTHON -m compileall -q -j 8 "$LEASE/vllm" >/dev/null
tail -n 5 "$LEASE/out/queue.txt"
