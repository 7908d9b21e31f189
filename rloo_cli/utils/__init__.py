"""What every room may use.

console          stdout and stderr that nothing printed can make fail
device_waits     wait for a GPU's queued work; the GPU of a thread
environment      numbers from torchrun's and Slurm's environment variables
errors           Problem, RunError tree, exit codes
exit_guard       user code cannot end the process
fault_injection  fault injection for tests
files            atomic file writes
paths            where conf/recipes/cache lie
pids             process identity by pid + start time
process_exit     how a worker process ends; libraries kept quiet
redact           secret masking
rng              random states, and a completion's sampling seed
signals          signal flag + check()
timers           phase timers of a step
"""
