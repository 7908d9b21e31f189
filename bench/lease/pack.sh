# Call 4: bring back what the queues have written, every 20 s until both are done, so that a call
# that is cut loses at most 20 s. LEASE_LIMIT is in seconds.
. "${LEASE:-/tmp/lease}/scripts/env.sh"
pack() { tar czf "$OUT/packing" -C "$LEASE" out && mv "$OUT/packing" "$OUT/results.tgz"; }
end=$((SECONDS + ${LEASE_LIMIT:-565}))
while [ -d "$LEASE/out" ] && [ ! -e "$LEASE/out/b.done" ] && [ $SECONDS -lt $end ]; do
  pack
  for _ in $(seq "${LEASE_EVERY:-20}"); do [ -e "$LEASE/out/b.done" ] || sleep 1; done
done
pack
tail -n 40 "$LEASE/out/queue.txt"
[ -e "$LEASE/out/b.done" ]
