"""The child process of `mathematics`: one JSON question per line in, one line out.

The line is "ready" once math-verify is imported, then one per question: "yes", "no", "no gold" (the
gold answer cannot be read), "slow" (the answer is too much to compute), "slow gold".

Questions are answered in a process forked from this one, which its own alarm ends when a question
takes too long: the next fork needs a few milliseconds, importing sympy anew would need seconds.
Everything ends when stdin closes.
"""

import json
import logging
import mmap
import os
import resource
import signal
import sys

from rloo_cli.rewards.common import math_gold

MAX_ADDRESS_SPACE = 4 << 30  # bytes of address space; an answer that needs more counts as too much
# How a process ends when a question is too much for it: the alarm, no memory (GMP), no stack.
TOO_MUCH_EXIT_CODES = (-signal.SIGALRM, -signal.SIGABRT, -signal.SIGSEGV)


def write_stdout_line(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def answer_questions(gold_is_read: mmap.mmap) -> None:
    """Answers what stdin asks. `gold_is_read`: one byte, shared with the process that forked us."""
    # The default action ends this process from inside the kernel. A Python handler would have to
    # wait for the C call that hangs.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for line in sys.stdin:  # each is sent once the one before is answered: none is read ahead
        question = json.loads(line)
        gold_is_read[0] = 0
        # A gold answer is short, and nothing that a model wrote: it has a second at least.
        signal.setitimer(signal.ITIMER_REAL, max(1, question["seconds"]))
        gold = math_gold.parse_gold(question["gold"])
        gold_is_read[0] = 1
        signal.setitimer(signal.ITIMER_REAL, question["seconds"])
        said = "no gold"
        if gold:
            said = "yes" if math_gold.is_equal_to_gold(gold, question["text"]) else "no"
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_stdout_line(said)


def main() -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    # Before the first fork: importing sympy takes seconds, and the first parsing of all a while.
    math_gold.is_equal_to_gold(math_gold.parse_gold(r"\frac{1}{2}"), r"\boxed{0.5}")
    resource.setrlimit(
        resource.RLIMIT_AS, (MAX_ADDRESS_SPACE, resource.getrlimit(resource.RLIMIT_AS)[1])
    )
    gold_is_read = mmap.mmap(-1, 1)
    write_stdout_line("ready")
    while True:
        pid = os.fork()
        if pid == 0:
            answer_questions(gold_is_read)
            os._exit(0)  # stdin is closed
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code not in TOO_MUCH_EXIT_CODES:
            os._exit(code % 256)
        write_stdout_line("slow" if gold_is_read[0] else "slow gold")


if __name__ == "__main__":
    main()
