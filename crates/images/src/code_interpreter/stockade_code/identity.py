"""The environment of the sandbox this guest is.

The service and its kernels were started before the guest had an identity: they are part of the template's
memory. The agent writes what each restored machine is to a file that root alone can read.
"""

import json
import os
import pathlib

PATH = "/run/stockade/identity.json"


def variables_of_e2b(directory="/run/e2b"):
    """What programs written for E2B look for; there before the identity is."""
    return {path.name[1:]: path.read_text() for path in pathlib.Path(directory).glob(".E2B_*")}


class Identity:
    """The file's content, read again whenever it was written again."""

    def __init__(self, path=PATH):
        self.path = path
        self._stamp = None
        self._env = {}

    def ask(self):
        """Has the agent write the file from now on: it tells only who has made it."""
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        os.close(os.open(self.path, os.O_CREAT | os.O_WRONLY, 0o600))

    def env(self):
        """Variables of this sandbox; empty as long as there is none."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return self._env
        if status.st_size == 0:
            return self._env
        stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        if stamp != self._stamp:
            with open(self.path, encoding="utf-8") as file:
                identity = json.load(file)
            self._env = {**identity["env"], **variables_of_e2b()}
            self._stamp = stamp
        return self._env
