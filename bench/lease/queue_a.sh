# Queue A: the rows without vLLM that need nothing of calls 2 and 3, which travel meanwhile.
. "$LEASE/scripts/env.sh"
cd "$LEASE/code"
gpu "prompts=64 rounds=2" "train phase W5"
gpu "" machine "head bfloat16" optimizer "captured decode 0.1B"
gpu "prompts=4 rounds=1" "train phase W7"
touch "$LEASE/out/a.done"
