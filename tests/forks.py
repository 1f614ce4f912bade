"""Python processes that begin with everything imported: forks of one process that has done nothing else.

    subprocess.run([python(), "-m", "commopt", "train", ...])

To import torch, commopt and what the trainer loads costs 3 to 9 seconds of processor time in a process of its own.
``python()`` is used as ``sys.executable`` is, and what it starts behaves as an interpreter does: it has its command's
environment, folder, cores, network, standard streams, exit code and parent, and gets its signals, but for SIGSTOP.
Where the law is of an interpreter itself (its number, its beginning, its end, its seed of hashes), tests start
``sys.executable``.

The command is a small program (fork_client.py) that asks the server for a fork and waits for its end. Run as a program,
this file is the server: one for a session of pytest, which ends with it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import logging
import marshal
import os
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import Any, NoReturn

CLIENT = Path(__file__).with_name("fork_client.py")
FOLDER = "COMMOPT_TESTS_FORKS"
"""The environment variable with the folder of the server's socket, and of the program that asks it."""

PRELOADED = (
    "torch", "torch._dynamo", "torch._dynamo.backends.common", "torch._dynamo.backends.debugging",
    "torch._functorch._aot_autograd.autograd_cache", "torch._dynamo.testing", "torch._dynamo.repro.after_dynamo",
    "torch._inductor.compiler_bisector", "torch._inductor.lowering", "torch.export._trace",
    "torch._higher_order_ops.passes", "torch._dynamo.dce_extra_outputs", "sympy.tensor.tensor",
    "torch.profiler._cupti_monitor", "torch.utils.serialization", "torch.nn.parallel",
    "torch.distributed.elastic.multiprocessing", "torch.distributed.run", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel", "torch.distributed.tensor.experimental",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.checkpoint._fsspec_filesystem", "torch.utils.tensorboard.writer",
    "commopt", "commopt.cli", "commopt.train.loop", "commopt.train.parse", "commopt.train.plot",
    "commopt.train.sharded", "commopt.probe.command",
    "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama", "tokenizers", "rich.logging", "rich.progress", "matplotlib.figure",
    "matplotlib.backends.backend_agg", "pytest", "hypothesis",
)  # fmt: skip
"""What processes of the tests import. It must start no thread, and compute nothing: a fork has one thread only."""

NO_THREADS = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Older torch (2.6) and pyarrow (25) start threads when they are imported, unless the environment says so."""


def python() -> str:
    """The path of a program to start in place of ``sys.executable``; it knows -m, -c, -u and files."""
    if FOLDER not in os.environ:
        start_server()
    return os.path.join(os.environ[FOLDER], "python")


def start_server() -> None:
    """Start the server, for this process and those that it starts; it ends with this one."""
    folder = tempfile.mkdtemp(prefix="forks-")
    address, program = os.path.join(folder, "socket"), Path(folder, "python")
    words = shlex.join([sys.executable, "-I", "-S", str(CLIENT), address])
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    program.chmod(0o700)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    command = [sys.executable, __file__, str(listener.fileno())]
    env = os.environ | NO_THREADS
    server = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=env)
    listener.close()
    os.environ[FOLDER] = folder

    def end(starter: int = os.getpid()) -> None:
        if os.getpid() == starter:
            assert server.stdin is not None
            server.stdin.close()
            server.wait()
            shutil.rmtree(folder)

    atexit.register(end)


def rarely_collect() -> None:
    """Leaves what there is to no collection of garbage, which would look through all of it, and in a fork copy it; and
    has these come when there are more new objects than some tensors make."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


# the server -----------------------------------------------------------------------------------------------------------

Request = tuple[list[str], dict[str, str], str, int, list[int], list[int]]
"""Arguments, environment, folder, parent and cores of a process; and its standard streams and network as open files."""


class Server:
    """Forks for whoever connects."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.clients: dict[int, socket.socket] = {}
        """By the process that each waits for."""
        self.selector = selectors.DefaultSelector()
        self.woken, self.wake = socket.socketpair()
        self.wake.setblocking(False)
        self.before = signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake.fileno(), warn_on_full_buffer=False)
        for source in (sys.stdin.fileno(), self.woken, listener):
            self.selector.register(source, selectors.EVENT_READ)

    def serve(self) -> Request | None:
        """Returns in each new process what that is to run, and None in the server when standard input ends."""
        while True:
            for key, _ in self.selector.select():
                source: Any = key.fileobj
                if source is self.listener:
                    request = self._fork(self.listener.accept()[0])
                    if request is not None:
                        return request
                elif source is self.woken:
                    self.woken.recv(4096)
                    self._reap()
                elif source == sys.stdin.fileno():
                    for process in self.clients:
                        os.kill(process, signal.SIGKILL)
                    return None
                else:
                    self._left(source)

    def _fork(self, client: socket.socket) -> Request | None:
        data, files, _, _ = socket.recv_fds(client, 1 << 20, 4)
        while len(data) < 8 or len(data) < 8 + int.from_bytes(data[:8], "little"):
            more = client.recv(1 << 20)
            if not more:  # killed while it asked
                for file in files:
                    os.close(file)
                client.close()
                return None
            data += more
        process = os.fork()
        if process == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, self.before)
            for one in (self.listener, self.woken, self.wake, self.selector, client, *self.clients.values()):
                one.close()
            return (*marshal.loads(data[8:]), files)
        for file in files:
            os.close(file)
        self.clients[process] = client
        with contextlib.suppress(OSError):  # killed since: the selector says so
            client.sendall(process.to_bytes(8, "little"))
        self.selector.register(client, selectors.EVENT_READ)
        return None

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                process, status = os.waitpid(-1, os.WNOHANG)
                if process == 0:
                    return
                client = self.clients.pop(process)
                with contextlib.suppress(KeyError):
                    self.selector.unregister(client)
                with client, contextlib.suppress(OSError):
                    client.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "little", signed=True))

    def _left(self, client: socket.socket) -> None:
        """A command was killed: what it stands for is."""
        self.selector.unregister(client)
        for process, other in self.clients.items():
            if other is client:
                os.kill(process, signal.SIGKILL)


KEPT: list[dict[str, Any]] = []
"""What a program has left: an interpreter keeps that until its exit handlers have run. (A DistributedDataParallel that
went before once waited for ever for a thread of Gloo.)"""


def become(argv: list[str], env: dict[str, str], folder: str, parent: int, cores: list[int], files: list[int]) -> None:
    """Be ``python argv...``, which ``parent`` has started."""
    for number, file in enumerate(files):
        if number < 3:
            os.dup2(file, number)
        elif not os.path.samestat(os.fstat(file), os.stat("/proc/self/ns/net")):
            assert ctypes.CDLL(None).setns(file, 0) == 0
        os.close(file)
    if cores:
        os.sched_setaffinity(0, cores)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    if env.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    os.getppid = lambda: parent
    unbuffered = argv[0] == "-u"
    argv = argv[unbuffered:]
    sys.stdout.reconfigure(write_through=unbuffered or bool(env.get("PYTHONUNBUFFERED")))  # type: ignore[attr-defined]
    ways = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    first = {"-c": "", "-m": folder}.get(argv[0], os.path.dirname(os.path.abspath(argv[0])))
    sys.path[:1] = [first, *ways]
    if argv[0] == "-c":
        main = types.ModuleType("__main__")
        sys.modules["__main__"], sys.argv = main, ["-c", *argv[2:]]
        exec(compile(argv[1], "<string>", "exec"), main.__dict__)
    elif argv[0] == "-m":
        sys.argv = argv[1:]
        KEPT.append(runpy.run_module(argv[1], run_name="__main__", alter_sys=True))
    else:
        sys.argv = argv
        KEPT.append(runpy.run_path(argv[0], run_name="__main__"))


def main() -> None:
    for name in PRELOADED:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:  # not every torch has all of its modules
            if error.name != name or not name.startswith("torch."):
                raise
    dynamic_rendezvous = sys.modules["torch.distributed.elastic.rendezvous.dynamic_rendezvous"]
    # What torchrun logs has names from inspect.stack(), which looks through all modules, for half a second in all.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name  # type: ignore[attr-defined]
    # Each collective of a distributed checkpoint is a line in a log that goes nowhere, a tenth of what saving takes.
    for name in ("default", "dcp_logger"):
        logging.getLogger(f"c10d-NullHandler-{name}").setLevel(logging.WARNING)
    threads = Path("/proc/self/task")
    assert not threads.exists() or len(list(threads.iterdir())) == 1, "what is imported has started a thread"
    rarely_collect()
    request = Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if request is not None:
        end(outcome(*request))


def outcome(*request: Any) -> int:
    """What the interpreter ends with after ``become(*request)``, and prints of its errors."""
    try:
        become(*request)
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            return exit_.code or 0
        print(exit_.code, file=sys.stderr)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
    else:
        return 0
    return 1


def end(code: int) -> NoReturn:
    """As an interpreter ends, but for the memory, which goes with the process: to tidy up all that was imported, in
    pages that a fork has to copy first, takes half a second of processor time. MPI ends where the interpreter does."""
    if "mpi4py.MPI" in sys.modules:
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads; closed
            code = 120 if code == 0 and stream is sys.stdout and not stream.closed else code
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
