"""The server of forks.py goes on when who has asked it is killed."""

import marshal
import os
import socket
import subprocess
import sys
import time

import pytest
from forks import FOLDER, python


def ask(program: str, says: int | None) -> None:
    """Asks for a process as fork_client.py does, and goes: after ``says`` bytes of what it asks for, or when all is
    said."""
    request = marshal.dumps((["-c", program], dict(os.environ), os.getcwd(), os.getppid(), []))
    files = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(os.path.join(os.environ[FOLDER], "socket"))
        length = [len(request).to_bytes(8, "little")]
        client.sendmsg(length, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        client.sendall(request[:says])


@pytest.mark.parametrize("says", [0, 10, None])
def test_who_is_killed_while_it_asks_takes_nobody_along(tmp_path, says):
    command = python()
    begun, late = tmp_path / "begun", tmp_path / "late"
    ask(f"import time, pathlib; pathlib.Path({str(begun)!r}).touch(); time.sleep(2); open({str(late)!r}, 'w')", says)
    said = subprocess.run([command, "-c", "print('here')"], stdout=subprocess.PIPE, text=True)
    assert (said.returncode, said.stdout) == (0, "here\n")
    time.sleep(2.5 if begun.exists() else 0)
    assert not late.exists()  # nobody stands for it: it was ended
