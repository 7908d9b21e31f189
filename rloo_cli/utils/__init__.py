"""What every room may use.

console          stdout and stderr that nothing printed can make fail
device_waits     wait for a GPU's queued work; the GPU of a thread
environment      numbers from torchrun's and Slurm's environment variables
errors           Problem, RunError and its kinds, exit codes
exit_guard       user code cannot end the process
fault_injection  fault injection for tests
files            writes whole files or none; waits for a pipe or socket
paths            where conf/recipes/cache lie
http             one JSON request with a deadline; an event loop on a thread
child_process    start processes and end them with all that they started
process_exit     how a worker process ends; libraries kept quiet
ports            who listens where, and a socket of our own
redact           masks secrets
rng              random states, and a completion's sampling seed
signals          whether a signal came, and a place to ask
sweep_time_slices  a trial's side of a sweep's time slices
timers           seconds of the phases of a step
"""
