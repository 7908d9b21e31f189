# Call 1: install what training needs, then start both queues, which outlive this call.
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "${LEASE:=/tmp/lease}"/{out,pieces,scripts}; export LEASE
cp "$here"/*.sh "$LEASE/scripts/"
. "$LEASE/scripts/env.sh"
mkdir -p "$LEASE/code" && tar c --exclude=./.lease . | tar x -C "$LEASE/code"
cp "$here"/piece.* "$LEASE/pieces/"
$PYTHON -m pip install --quiet --no-index --no-deps --no-compile --target "$LEASE/site" \
  "$here"/wheels/*.whl || exit 1
nvidia-smi
for queue in a b; do setsid taskset -c 0-7 bash "$LEASE/scripts/queue_$queue.sh" </dev/null >/dev/null 2>&1 & done
