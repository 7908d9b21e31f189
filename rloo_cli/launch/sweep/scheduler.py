"""The loop of a sweep: it starts trials, schedules their time slices, and answers other terminals.

It runs in one thread. A trial has the device from the start of its time slice until it reports that
it has left, so no two trials are there at once unless `--jobs` allows it.
"""

import contextlib
import selectors
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rloo_cli.launch.sweep import commands, time_slices
from rloo_cli.launch.sweep.running import Sweep
from rloo_cli.launch.sweep.state import OPEN_STATES, SweepState
from rloo_cli.launch.sweep.table import SweepDisplay
from rloo_cli.launch.sweep.trial import TrialPhase, TrialProcess
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.signals import SIGNALS, stop_signals
from rloo_cli.utils.sweep_time_slices import JsonLineSocket

TICK_S = 0.05
SWEEP_STOPPED_CODE, SWEEP_KILLED_CODE = 75, 130


class SweepScheduler(Sweep):
    """A sweep and its loop."""

    def __init__(
        self,
        sweep_state: SweepState,
        show: SweepDisplay,
        gpus: list[str] | None = None,
        max_trials: int | None = None,
    ):
        super().__init__(sweep_state, show, gpus, max_trials)
        self.selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Run until every trial has ended. -> the sweep's exit code"""
        self.sweep_state.state = "training"
        self.sweep_state.save()
        commands.clear_requests(self.sweep_state.folder)
        with _listening() as (listening, self.socket), self._catch_signals(), self.show:
            self.selector.register(listening, selectors.EVENT_READ)
            try:
                while self._has_running():
                    self._tick()
            finally:
                self._end_all()
                self.selector.close()
        return self._exit_code()

    def _has_running(self) -> bool:
        processes = self.trial_processes
        return any(p.is_open and (p.process or not self.signals) for p in processes)

    def _tick(self) -> None:
        for key, _ in self.selector.select(TICK_S):
            self._receive(key)
        for process in self.trial_processes:
            if process.is_open and (code := process.exit_code()) is not None:
                self._trial_ended(process, code)
        folder = self.sweep_state.folder
        commands.serve_requests(folder, lambda request: commands.answer_request(self, request))
        if self.signals:
            self._forward_signal()
        else:
            for process in self.trial_processes:
                commands.act_at_boundary(process, self.show)
            time_slices.halve_trials(self)
            time_slices.schedule_slices(self)
        self.save_state(False)
        self.show.refresh(self.trial_processes)

    def _forward_signal(self) -> None:
        """Send the signal also to a trial that was starting when it arrived."""
        if self.sweep_state.state == "training":
            self.sweep_state.state = "stopping"
            self.show.print_note("stopping: every trial saves its present step")
        for process in self.trial_processes:
            if not process.signalled:
                process.send_signal(self.signals[0])

    def _receive(self, key: selectors.SelectorKey) -> None:
        """Accept a trial's connection, or handle what a trial has sent."""
        if key.data is None:
            assert isinstance(key.fileobj, socket.socket)
            end, _ = key.fileobj.accept()
            self.selector.register(end, selectors.EVENT_READ, JsonLineSocket(end))
            return
        line: JsonLineSocket = key.data
        messages = line.receive()
        if messages is None:
            self.selector.unregister(key.fileobj)
            line.connection.close()
            return
        for message in messages:
            number = message["trial"]
            process = next(p for p in self.trial_processes if p.trial.number == number)
            process.connection = line
            self._handle_message(process, message)

    def _handle_message(self, trial_process: TrialProcess, message: JsonObject) -> None:
        if not trial_process.is_open:
            return
        if "step" in message:
            trial_process.trial.step, trial_process.phase = message["step"], TrialPhase.BOUNDARY
            trial_process.trial.state = "waiting"
            self.show.report_boundary(trial_process)
        elif "parked" in message:
            trial_process.phase, trial_process.on_device = TrialPhase.OFFLOADED, False
        elif "saved" in message:
            trial_process.phase = trial_process.phase_before_save
            commands.add_clones(self, trial_process, message["saved"])

    def _trial_ended(self, trial_process: TrialProcess, code: int) -> None:
        trial_process.phase, trial_process.on_device = TrialPhase.DONE, False
        _record_end(trial_process, code, bool(self.signals))
        self.show.report_end(trial_process)
        commands.drop_clones(trial_process, self.show)
        self.save_state()

    @contextmanager
    def _catch_signals(self) -> Iterator[None]:
        def forward(number: int, frame: FrameType | None) -> None:
            self.signals.append(number)
            for process in self.trial_processes:
                process.send_signal(number)

        before = {n: signal.signal(n, forward) for n in stop_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end_all(self) -> None:
        """Let the trials save and end even if the loop itself has failed."""
        for process in self.trial_processes:
            process.send_signal(signal.SIGTERM)
        for process in self.trial_processes:
            if process.process is not None:
                with contextlib.suppress(Exception):
                    process.process.wait(60)
                process.process.kill()

    def _exit_code(self) -> int:
        states = [trial.state for trial in self.sweep_state.trials]
        codes = [t.code for t in self.sweep_state.trials if t.state == "failed" and t.code]
        if self.signals and any(state in OPEN_STATES for state in states):
            killed = any(p.trial.code == SWEEP_KILLED_CODE for p in self.trial_processes)
            code = SWEEP_KILLED_CODE if killed else SWEEP_STOPPED_CODE
            self.sweep_state.state = "stopped"
        else:
            code = next((c if c > 0 else 1 for c in codes), 0)
            self.sweep_state.state = "failed" if "failed" in states else "finished"
        self.sweep_state.save()
        return code


def _record_end(trial_process: TrialProcess, code: int, stop_requested: bool) -> None:
    """Record how a trial ended, by its exit code. `stop_requested`: the sweep was asked to stop."""
    trial = trial_process.trial
    trial.code = code
    if code == 0:
        trial.state, trial.step = "finished", trial_process.max_steps or trial.step
    elif code == SWEEP_STOPPED_CODE and trial_process.stop_reason:
        trial.state, trial.why = "stopped", trial_process.stop_reason
    elif stop_requested and code in (SWEEP_STOPPED_CODE, SWEEP_KILLED_CODE, *(-n for n in SIGNALS)):
        trial.state, trial.why = "waiting", "the sweep was stopped"
    elif code == SWEEP_STOPPED_CODE:
        trial.state, trial.why = "stopped", "a signal to this trial alone"
    else:
        log = trial_process.sweep_state.trial_log(trial)
        trial.state, trial.why = "failed", f"exit code {code}: {log}"


@contextmanager
def _listening() -> Iterator[tuple[socket.socket, Path]]:
    """A socket that trials connect to, and its path.

    It is not in the sweep's folder: a socket's path is short, and on a local file system.
    """
    with tempfile.TemporaryDirectory(prefix="rloo-") as folder:
        path = Path(folder, "turns")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen()
            yield listening, path
