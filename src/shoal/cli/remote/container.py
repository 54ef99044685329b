"""What podman, or else docker, is told so that it runs shoal from an image. Pure: of the file and what the host has.

    pull the image --> `join` once, with the invitation at its standard input --> one container for each unit

A container has the host's network. Of the host's files it sees shoal's own folders and the user's caches, at the same
paths: what it writes there belongs to the user.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from shoal.cli.remote.hosts_file import HostEntry
from shoal.cli.remote.probe import HOME, UNITS, HostFacts

ENGINE: Final = (
    "engine=$(command -v podman || command -v docker) || { echo 'there is no podman and no docker' >&2; exit 1; }; "
)
"""Finds what runs containers, as the probe does, for who has not probed."""
_STOP_S: Final = 60
MOST_STARTS: Final = 10
_FOLDERS: Final = (HOME, ".config/shoal", ".cache")
MAKE_FOLDERS: Final = "umask 077; mkdir -p " + " ".join(f'"$HOME/{each}"' for each in _FOLDERS)
"""What a container sees of the host; docker would make what is not there for root alone."""


def container_name(unit: str) -> str:
    """Return the name of a unit's container."""
    return f"shoal-{unit}"


@dataclass(frozen=True)
class ContainerImage:
    """An image that has shoal, as deploy/Containerfile makes one."""

    image: str

    def is_there(self, entry: HostEntry, facts: HostFacts) -> bool:
        """Whether the host has the image."""
        return facts.containers.has_image

    def script(self, entry: HostEntry, facts: HostFacts) -> str:
        """Return the shell commands that get it, and see whether it has shoal."""
        engine, image = shlex.quote(facts.containers.engine), shlex.quote(self.image)
        return f"set -e\n{engine} pull --quiet {image}\n{engine} run --rm --entrypoint shoal {image} --version\n"

    def problems(self, entry: HostEntry, facts: HostFacts) -> Iterator[str]:
        """Yield why the host cannot run it, with what to do about it."""
        found = facts.containers
        if not found.engine:
            yield "there is no podman and no docker: `sudo apt install podman` there, or leave `image` out of the file"
        elif found.says and found.is_podman:
            yield f"podman does not work there: {found.says}"
        elif found.says:
            yield (
                f"docker does not answer: {found.says}: `sudo systemctl start docker` there, and "
                "`sudo usermod -aG docker $USER` lets this user in from the next login on"
            )
        elif self._uses_gpus(entry, facts) and not found.lends_gpus:
            yield (
                "its GPUs cannot be lent to a container: install NVIDIA's container toolkit there (for podman, then "
                "`sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`), or take device: cpu"
            )

    def told(self, facts: HostFacts) -> str:
        """Return what bringing it there is, in words."""
        return f"pulls {self.image} with {facts.containers.engine}"

    def once(self, entry: HostEntry, facts: HostFacts, words: str) -> str:
        """Return what has a shell run a command of shoal that ends by itself, with the shell's standard input."""
        run = (facts.containers.engine, "run", "--rm", "--interactive", *self._options(facts), self.image)
        return f"{MAKE_FOLDERS}; exec {shlex.join(run)} {words}"

    def beside(self, unit: str, words: str) -> str:
        """Return what has a shell run a command of shoal in the container of a unit."""
        return f'{ENGINE}exec "$engine" exec {container_name(unit)} shoal {words}'

    def argv(self, entry: HostEntry, facts: HostFacts, unit: str, words: tuple[str, ...]) -> tuple[str, ...]:
        """Return what starts the container of a unit, which runs a command of shoal."""
        trains = words[0] == "join"
        restart = ("--restart", f"on-failure:{MOST_STARTS}") if trains else ()
        gpus: tuple[str, ...] = ()
        if trains and self._uses_gpus(entry, facts):
            gpus = ("--device", "nvidia.com/gpu=all") if facts.containers.is_podman else ("--gpus", "all")
        return (
            *(facts.containers.engine, "run", "--detach", "--name", container_name(unit)),
            *restart,
            # As Ctrl-C. No other process has to be the first one there: the launcher reaps what its roles leave.
            *("--stop-signal", "SIGINT", "--stop-timeout", str(_STOP_S)),
            # That of deploy/Containerfile asks for a client.
            "--no-healthcheck",
            *("--log-driver", "json-file", "--log-opt", "max-size=16m"),
            *("--workdir", f"{facts.home}/{UNITS}/{unit}"),
            *gpus,
            *self._options(facts),
            self.image,
            *words,
        )

    def _uses_gpus(self, entry: HostEntry, facts: HostFacts) -> bool:
        return bool(facts.gpus and entry.servers) and entry.device != "cpu"

    def _options(self, facts: HostFacts) -> tuple[str, ...]:
        found, home = facts.containers, facts.home
        user = found.user
        names: tuple[str, ...] = ()
        if found.is_podman and user != "0:0":
            # The user has the same number inside. podman refuses this to root, for whom both are the same anyway.
            names = ("--userns", "keep-id")
        elif found.is_rootless:
            user = "0:0"  # who is root inside is the user outside
        volumes = [word for each in _FOLDERS for word in ("--volume", f"{home}/{each}:{home}/{each}")]
        return (
            *("--network", "host", "--user", user),
            *names,
            # Labels of SELinux would have to be changed in the user's own folders.
            *("--cap-drop", "all", "--security-opt", "no-new-privileges", "--security-opt", "label=disable"),
            # docker has no name for the user's number, and torch asks for one.
            *("--env", f"HOME={home}", "--env", "USER=shoal", *volumes, "--entrypoint", "shoal"),
        )
