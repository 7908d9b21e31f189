"""Helpers for every package.

child_process    start processes, and end them with all their children
console          stdout and stderr that never fail
device_waits     wait for a GPU's queued work; the GPU of a thread
environment      numbers from torchrun's and Slurm's environment variables
errors           Problem, RunError and its kinds, exit codes
exit_guard       keep user code from ending the process
fault_injection  fault injection for tests
files            write files atomically; wait for a pipe or socket
heartbeat        heartbeats of a process to its parent
http             the HTTP client: limits, retries, an event loop on a thread
main_thread_calls  detect user code that needs a main thread
message_socket   messages over a socket between a parent and its own child
metrics          every metric, as the modules declare them; how steps merge
paths            the folders of conf, recipes and cache
ports            listening processes, and sockets of our own
process_exit     how a worker process ends; silence libraries
redact           mask secrets
rng              random states, and a completion's sampling seed
scratch_folder   temporary folders removed after a killed owner
signals          signals that ask the run to stop
sweep_time_slices  a trial's side of a sweep's time slices
timers           seconds of the phases of a step
web_addresses    public addresses
worker_pool      worker processes with deadlines, forked on demand
worker_process   the process that forks them, and what runs in a worker
"""
