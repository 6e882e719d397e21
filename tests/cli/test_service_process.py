"""A service ends with all its processes: on Ctrl-C, SIGTERM, a closed terminal or a closed pipe."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lorikeet.cli.serve.service_process import STOP_SIGNAL

ROOT = Path(__file__).parents[2]

# Exits on SIGINT with 0, as `serve run` does, and leaves a worker, as a killed one does.
SERVICE = """
import signal, subprocess, sys, time
worker = [sys.executable, "-c", "import time; time.sleep(60)"]
try:
    print("worker", subprocess.Popen(worker, process_group=0).pid, flush=True)
    time.sleep({sleeps_s})
except KeyboardInterrupt:
    time.sleep({stops_s})
"""

# With a third argument the service answers seconds before its start is over.
RUNNER = """
import os, signal, subprocess, sys, time
from lorikeet.cli.output import say
from lorikeet.cli.serve.service_process import (
    STOP_SIGNAL, ServiceProcess, Terminated, raise_when_terminated,
)

class SlowlyStarted(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        time.sleep(3)

if len(sys.argv) > 3:
    subprocess.Popen = SlowlyStarted
raise_when_terminated()
signal.signal(STOP_SIGNAL, signal.default_int_handler)
service = ServiceProcess([sys.executable, "-c", sys.argv[1]], os.environ)
try:
    service.start()
    while not service.ends_within(0.1):
        pass
    say("ended by itself")
    sys.exit(service.stop(float(sys.argv[2])))
except (KeyboardInterrupt, Terminated):
    sys.exit(service.stop(float(sys.argv[2])))
"""


class Run:
    """A runner and its service, which may take `within_s` to stop.

    ignored: signals that the runner inherits as ignored; it does not inherit those that the tests
        ignore, as under nohup.
    """

    def __init__(self, output, ignored=(), sleeps_s=60, stops_s=0, within_s=9, arguments=()):
        service = SERVICE.format(sleeps_s=sleeps_s, stops_s=stops_s)
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUNNER, service, str(within_s), *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: [
                signal.signal(each, signal.SIG_IGN if each in ignored else signal.SIG_DFL)
                for each in (signal.SIGHUP, signal.SIGINT)
            ],
        )

    def send(self, number):
        self.process.send_signal(number)
        return self.process.wait(30)


@pytest.fixture
def piped():
    """Return a function that runs with a pipe as output; its processes end with the test."""
    runs = []

    def start(**options):
        run = Run(subprocess.PIPE, **options)
        runs.append(run)
        return run, worker_of(run.process.stdout.readline())

    yield start
    for run in runs:
        run.process.kill()
        run.process.wait()
        run.process.stdout.close()


def worker_of(line):
    word, pid = line.split()
    assert word == b"worker"
    return psutil.Process(int(pid))


def is_gone(process):
    deadline = time.monotonic() + 20
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_service_and_its_workers(piped, number):
    run, worker = piped()
    assert run.send(number) == 0
    assert is_gone(worker)
    assert b"Stopped." in run.process.stdout.read()


def test_stop_ends_a_background_service_of_a_script_without_an_error(piped):
    run, worker = piped(ignored=[signal.SIGINT], stops_s=1)
    assert run.send(STOP_SIGNAL) == 0
    assert is_gone(worker)
    assert run.process.stdout.read().splitlines()[-1] == b"Stopped."


def test_a_background_service_of_a_script_ends_on_sigterm(piped):
    run, worker = piped(ignored=[signal.SIGINT])
    assert run.send(signal.SIGTERM) == 0
    assert is_gone(worker)


def test_sigterm_during_the_start_leaves_no_workers(piped):
    run, worker = piped(arguments=["slowly"])
    assert run.send(signal.SIGTERM) == 0
    assert is_gone(worker)
    assert b"Stopped." in run.process.stdout.read()


def test_nohup_keeps_the_service(piped):
    run, worker = piped(ignored=[signal.SIGHUP])
    run.process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert run.process.poll() is None
    assert run.send(signal.SIGTERM) == 0
    assert is_gone(worker)


def test_a_service_that_does_not_stop_is_killed(piped):
    run, worker = piped(stops_s=60, within_s=2)
    assert run.send(signal.SIGTERM) == 1
    assert is_gone(worker)


def test_a_service_that_ends_without_a_signal_leaves_no_workers(piped):
    run, worker = piped(sleeps_s=0.1)
    assert run.process.wait(30) == 0
    assert b"ended by itself" in run.process.stdout.read()
    assert is_gone(worker)


def test_a_closed_output_pipe_ends_the_service(piped):
    run, worker = piped()
    run.process.stdout.close()
    assert run.process.wait(30) == 0
    assert is_gone(worker)


def test_a_closed_terminal_ends_the_service_even_without_sighup():
    terminal, inside = pty.openpty()
    run = Run(inside)
    os.close(inside)
    with os.fdopen(terminal, "rb") as reader:
        worker = worker_of(reader.readline())
    assert run.process.wait(10) == 0
    assert is_gone(worker)
