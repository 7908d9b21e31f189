"""The child process of `math_equal`: it reads one JSON question per line and answers with a line.

It writes "ready" once math-verify is imported, then for each question "yes", "no", "no gold" (the
gold answer cannot be read), "slow" (the answer takes too long), or "slow gold".

Questions are answered in a process forked from this one, which its own alarm ends when a question
takes too long: the next fork needs a few milliseconds, importing sympy again would need seconds.
All processes end when stdin closes.
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
    """Answer the questions on stdin. `gold_is_read`: a byte shared with the process that forked."""
    # The default action ends this process from inside the kernel. A Python handler would have to
    # wait for the C call that hangs.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for line in sys.stdin:  # each comes after the answer to the one before: none is read ahead
        question = json.loads(line)
        gold_is_read[0] = 0
        # A gold answer is short and not written by a model: it has at least a second.
        signal.setitimer(signal.ITIMER_REAL, max(1, question["seconds"]))
        gold = math_gold.parse_gold(question["gold"])
        gold_is_read[0] = 1
        signal.setitimer(signal.ITIMER_REAL, question["seconds"])
        answer = "no gold"
        if gold:
            answer = "yes" if math_gold.is_equal_to_gold(gold, question["text"]) else "no"
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_stdout_line(answer)


def main() -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    # Before the first fork: importing sympy takes seconds, and the first parse is slow as well.
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
