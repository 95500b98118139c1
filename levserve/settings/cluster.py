"""Finds this host's place in a cluster from the variables that the cluster sets (`--coordinator auto`).

LeaderWorkerSet on Kubernetes, SLURM and TPU pods set them; without any, a TPU machine's metadata server is
asked. jax.distributed looks at the same variables, but jax must not be imported before the fork.
"""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import NamedTuple

from levserve.errors import ConfigError

PORT = 8890
"""The port where hosts meet, unless a cluster may run several jobs on a machine; the next is used too."""
SLURM_PORTS = 61440
"""The first of 4096 ports that SLURM jobs share; the job's number selects two of them."""
FIRST_NODE = re.compile(r"([^,\[]+)(?:\[(\w+))?")
TPU_DEVICES = ("/dev/accel0", "/dev/vfio/0")
METADATA_SERVER = "metadata.google.internal"
METADATA_SECONDS = 5.0


class HostPlace(NamedTuple):
    """This process's place among the hosts; `source` is the variable or server that tells it."""

    coordinator: str
    num_hosts: int
    host_id: int
    source: str


def find_place(environ: Mapping[str, str]) -> HostPlace:
    """Raises `ConfigError` if no cluster is found or its variables make no sense."""
    for variable, find in FINDERS.items():
        if environ.get(variable):
            try:
                return find(environ)
            except (KeyError, ValueError) as error:
                raise ConfigError(
                    f"--coordinator auto: {variable} is set, but the variables beside it are missing or "
                    f"make no sense ({error})"
                ) from None
    if any(map(os.path.exists, TPU_DEVICES)) or environ.get("GCE_METADATA_IP"):
        return _ask_metadata(environ.get("GCE_METADATA_IP", METADATA_SERVER))
    raise ConfigError(
        "--coordinator auto: no variables of LeaderWorkerSet, SLURM or a TPU pod are set; "
        "give --coordinator, --num-hosts and --host-id"
    )


def _leader_worker_set(environ: Mapping[str, str]) -> HostPlace:
    address = f"{environ['LWS_LEADER_ADDRESS']}:{PORT}"
    return HostPlace(
        address, int(environ["LWS_GROUP_SIZE"]), int(environ["LWS_WORKER_INDEX"]), "LWS_LEADER_ADDRESS"
    )


def _slurm(environ: Mapping[str, str]) -> HostPlace:
    num_tasks = int(environ["SLURM_NTASKS"])
    num_nodes = int(environ.get("SLURM_STEP_NUM_NODES") or environ["SLURM_NNODES"])
    if num_tasks != num_nodes:
        raise ConfigError(
            f"--coordinator auto: SLURM runs {num_tasks} tasks on {num_nodes} nodes, and levserve needs one "
            "task on each (srun --ntasks-per-node=1)"
        )
    found = FIRST_NODE.match(environ["SLURM_STEP_NODELIST"])
    if found is None:
        raise ValueError("SLURM_STEP_NODELIST")
    node = found[1] + (found[2] or "")
    port = SLURM_PORTS + 2 * (int(environ["SLURM_JOB_ID"]) % 2048)
    return HostPlace(f"{node}:{port}", num_tasks, int(environ["SLURM_PROCID"]), "SLURM_STEP_NODELIST")


def _tpu(environ: Mapping[str, str]) -> HostPlace:
    if int(environ.get("MEGASCALE_NUM_SLICES") or 1) > 1:
        raise ConfigError(
            "--coordinator auto: this TPU has several slices; a model is served by the hosts of one slice"
        )
    hosts = environ["TPU_WORKER_HOSTNAMES"].split(",")
    return HostPlace(f"{hosts[0]}:{PORT}", len(hosts), int(environ["TPU_WORKER_ID"]), "TPU_WORKER_HOSTNAMES")


FINDERS: Mapping[str, Callable[[Mapping[str, str]], HostPlace]] = {
    "LWS_LEADER_ADDRESS": _leader_worker_set,
    "SLURM_STEP_NODELIST": _slurm,
    "TPU_WORKER_HOSTNAMES": _tpu,
}
"""By the variable whose presence identifies the kind of cluster."""


def _ask_metadata(server: str) -> HostPlace:
    """Reads a TPU machine's number and the machines of its slice from Google's metadata server."""
    try:
        host_id = int(_attribute(server, "agent-worker-number"))
        endpoints = _attribute(server, "worker-network-endpoints").split(",")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--coordinator auto: the metadata server {server} does not know this TPU's hosts ({error}); "
            "give --coordinator, --num-hosts and --host-id"
        ) from None
    first = endpoints[0].split(":")[-1]  # a name alone, or name:id:address
    return HostPlace(f"{first}:{PORT}", len(endpoints), host_id, f"metadata server {server}")


def _attribute(server: str, name: str) -> str:
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/instance/attributes/{name}",
        headers={"Metadata-Flavor": "Google"},
    )
    with urllib.request.urlopen(request, timeout=METADATA_SECONDS) as answer:
        return str(answer.read().decode()).strip()
