# Call 2: the second part of what travels.
. "${LEASE:-/tmp/lease}/scripts/env.sh"
cp "$(dirname "$0")"/piece.* "$LEASE/pieces/"
tail -n 5 "$LEASE/out/queue.txt"
