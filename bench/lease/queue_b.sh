# Queue B: whole steps and the real run, alone on the GPU after queue A.
. "$LEASE/scripts/env.sh"
cd "$LEASE/code"
until [ -e "$LEASE/out/a.done" ]; do sleep 1; done
gpu "turns=1 steps=3" "whole step W5, no vLLM"
gpu "" "real run"
gpu "turns=1 steps=2" "whole step W8"
touch "$LEASE/out/b.done"
