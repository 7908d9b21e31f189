"""Helpers that every package may use.

child_process    start processes and end them with all that they started
console          stdout and stderr that nothing printed can make fail
device_waits     wait for a GPU's queued work; the GPU of a thread
environment      numbers from torchrun's and Slurm's environment variables
errors           Problem, RunError and its kinds, exit codes
exit_guard       user code cannot end the process
fault_injection  fault injection for tests
files            write whole files or none; wait for a pipe or socket
heartbeat        signs of life of a process for the one that started it
http             the HTTP client: limits, retries, an event loop on a thread
main_thread_calls  user code that needs a main thread is noticed
message_socket   messages over a socket between a parent and its own child
metrics          every metric, as the modules declare them; how steps merge
paths            the folders of conf, recipes and cache
ports            who listens where, and a socket of our own
process_exit     how a worker process ends; libraries kept quiet
redact           mask secrets
rng              random states, and a completion's sampling seed
scratch_folder   temporary folders that do not outlive a killed owner for long
signals          whether a signal has asked the run to end
sweep_time_slices  a trial's side of a sweep's time slices
timers           seconds of the phases of a step
web_addresses    which addresses are of the open network
worker_pool      worker processes with deadlines, forked when one is needed
worker_process   the process that forks them, and what runs in a worker
"""
