"""Server that forks processes of tests from one that has imported torch, 2 s of processor time."""

import multiprocessing

FORKSERVER = multiprocessing.get_context("forkserver")
PRELOADED = ["lorikeet_engine.process.server", "lorikeet_engine.execution.follower"]
FORKSERVER.set_forkserver_preload(PRELOADED)
