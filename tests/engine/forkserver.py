"""Server that forks processes of tests from one that has imported what they need."""

import multiprocessing

FORKSERVER = multiprocessing.get_context("forkserver")
_preloaded: list[str] = []


def preload(*modules: str) -> None:
    """Make the server import modules when it starts, beside those of earlier calls.

    Call it when a test file is imported: the server starts with the first process.
    """
    _preloaded.extend(module for module in modules if module not in _preloaded)
    FORKSERVER.set_forkserver_preload(_preloaded)
