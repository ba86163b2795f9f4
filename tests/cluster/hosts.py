"""Hosts made of namespaces: addresses, homes and processes of their own, and an SSH server each.

Everything hangs on one process a host. It dies with the process that made the host, and takes its
namespaces, links and processes along; SIGKILL to it is a power failure.
"""

import os
import select
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

HOME = Path("/srv")
"""The home folder on every host. The real one keeps what it has."""
USER = "me"
_INIT = Path(__file__).with_name("host_init.sh")
_NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")
_TOOLS = ("ip", "nsenter", "rsync", "setpriv", "ssh", "ssh-keygen", "sshd", "unshare")
_UNSHARE = ("unshare", *_NAMESPACES, "--fork", "--mount-proc")
_TRIAL = "mount --make-rprivate / && mount -t tmpfs tmpfs /run && ip link add type veth"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SSHD = """\
ListenAddress {address}
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PrintLastLog no
UseDNS no
Subsystem sftp internal-sftp
"""
# No index is in reach; what the project needs is there, and what builds it.
_PIP = "[global]\nno-index = true\ndisable-pip-version-check = true\nno-build-isolation = false\n"


def lacking() -> str:
    """Return what this machine lacks to make hosts; empty: nothing."""
    if os.geteuid() != 0:
        return "root"
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
    if missing:
        return ",".join(missing)
    tried = subprocess.run([*_UNSHARE, "sh", "-c", _TRIAL], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "namespaces"


class Host:
    """One host. Its disk, ``folder``, outlives a power failure; its /tmp does not.

    Args:
        name: Its host name.
        address: Its IPv4 address; other hosts find it there after ``Network.connect``.
        folder: An empty folder.
        shared: Folders of this machine that the host sees, read-only.
    """

    def __init__(self, name: str, address: str, folder: Path, shared: Sequence[Path]) -> None:
        self.name = name
        self.address = address
        self._folder = folder
        self._shared = shared
        for own in ("srv", "etc/ssh"):
            (folder / own).mkdir(parents=True)
        (folder / "etc/hosts").write_text(f"127.0.0.1 localhost\n{address} {name}\n")
        (folder / "etc/passwd").write_text(
            f"{USER}:x:0:0::{HOME}:/bin/bash\n" + Path("/etc/passwd").read_text()
        )

    @property
    def disk(self) -> Path:
        """Where this machine sees the host's root folder."""
        return self._folder

    def serve_ssh(self, public_key: Path) -> None:
        """Let the owner of a key in, from the next start on."""
        (self._folder / "etc/ssh/sshd_config").write_text(_SSHD.format(address=self.address))
        make_key(self._folder / "etc/ssh/ssh_host_ed25519_key")
        (self._folder / "srv/.ssh").mkdir(mode=0o700)
        shutil.copy(public_key, self._folder / "srv/.ssh/authorized_keys")

    def boot(self) -> None:
        """Make the namespaces; call ``serve`` when the network is there."""
        shutil.rmtree(self._folder / "tmp", ignore_errors=True)
        (self._folder / "tmp").mkdir()
        (self._folder / "tmp").chmod(0o1777)
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL"]
            + [*_UNSHARE, "--kill-child", str(_INIT), self.name, str(self._folder)]
            + [str(path) for path in self._shared],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self._folder / "boot.log").open("a"),
            env={"PATH": _PATH, "HOME": str(HOME), "LANG": "C.UTF-8"},
            text=True,
        )
        self._await_word("booted")
        pid = self._process.pid
        self.init_pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())

    def serve(self) -> None:
        """Start the SSH server, if ``serve_ssh`` has been called."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._await_word("serving")
        self._own = self._pids()

    def _await_word(self, word: str) -> None:
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        if said != word:
            raise RuntimeError(f"host {self.name} said {said!r} where {word!r} was due")

    def command(self, *command: str, cwd: Path = HOME) -> list[str]:
        """Return what runs a command on the host, in a clean environment."""
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{_PATH}",
            "HOME": str(HOME),
            "USER": USER,
            "LANG": "C.UTF-8",
            "RAY_USAGE_STATS_ENABLED": "0",  # there is no way out from here
        }
        return [
            *("nsenter", "--target", str(self.init_pid)),
            *(*_NAMESPACES, f"--wd={cwd}"),
            *("env", "-i", *(f"{name}={value}" for name, value in environment.items())),
            *command,
        ]

    def lose_power(self) -> None:
        """End everything on the host at once; it can be booted again."""
        os.kill(self.init_pid, 9)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def await_silence(self, within_s: float) -> list[str]:
        """Wait until only the host's own processes are left; return the commands of others."""
        return await_end(lambda: self._pids() - self._own, within_s)

    def _pids(self) -> set[int]:
        namespace = os.readlink(f"/proc/{self.init_pid}/ns/pid")
        return {pid for pid in all_pids() if _pid_namespace(pid) == namespace}


class Network:
    """One segment, at a bridge in the namespace of its first host."""

    def __init__(self, first: Host) -> None:
        self._first = first
        self._num_links = 0
        self._ip(first, "link", "set", "lo", "up")
        # Its own address: else it has that of one of its links, and another when that link goes.
        self._ip(first, "link", "add", "br0", "address", "02:00:00:00:00:01", "type", "bridge")
        self._ip(first, "addr", "add", f"{first.address}/24", "dev", "br0")
        self._ip(first, "link", "set", "br0", "up")

    def connect(self, host: Host) -> None:
        """Give a booted host its address. No default route: nothing else is in reach."""
        self._num_links += 1
        port = f"port{self._num_links}"
        peer = ("peer", "name", "eth0", "netns", str(host.init_pid))
        self._ip(self._first, "link", "add", port, "type", "veth", *peer)
        self._ip(self._first, "link", "set", port, "master", "br0", "up")
        self._ip(host, "link", "set", "lo", "up")
        self._ip(host, "addr", "add", f"{host.address}/24", "dev", "eth0")
        self._ip(host, "link", "set", "eth0", "up")

    @staticmethod
    def _ip(host: Host, *arguments: str) -> None:
        namespace = ("nsenter", "--target", str(host.init_pid), "--net")
        subprocess.run([*namespace, "ip", *arguments], check=True)


def make_key(path: Path) -> None:
    """Make an SSH key without a passphrase."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True)


def install_all_but_the_project(folder: Path) -> None:
    """Make the virtual environment that lacks only this project, and a pip without an index.

    The packages are those of the running interpreter, by reference; its own project is not
    among them where that is installed to be edited.

    Args:
        folder: What will be the host's root folder.
    """
    environment = folder / f"{HOME}/rlmesh-env".lstrip("/")
    venv.EnvBuilder(symlinks=True).create(environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for script in ("pip", "ray"):
        _, body = (Path(sys.executable).parent / script).read_text().split("\n", 1)
        (environment / "bin" / script).write_text(f"#!{HOME}/rlmesh-env/bin/python\n{body}")
        (environment / "bin" / script).chmod(0o755)
    settings = folder / f"{HOME}/.config/pip/pip.conf".lstrip("/")
    settings.parent.mkdir(parents=True)
    settings.write_text(_PIP)


def all_pids() -> list[int]:
    """Return the processes of this machine."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def await_end(pids: Callable[[], set[int]], within_s: float) -> list[str]:
    """Wait until a set of processes is empty; return the commands of those still in it."""
    deadline_s = time.monotonic() + within_s
    while left := pids():
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            return sorted(_command_line(pid) for pid in left)
        _await_end_of_one(left.pop(), remaining_s)
    return []


def _await_end_of_one(pid: int, within_s: float) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([descriptor], [], [], within_s)
    finally:
        os.close(descriptor)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:  # it has just ended
        return ""


def _pid_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""
