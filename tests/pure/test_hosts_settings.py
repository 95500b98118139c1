"""The settings of several hosts: given, found in a cluster's variables, or refused in a sentence."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from levserve.errors import ConfigError
from levserve.settings.cluster import PORT
from levserve.settings.environment import read_environment
from levserve.settings.hosts import split_address
from levserve.settings.parse import read_settings
from levserve.settings.settings import Settings

LWS = {"LWS_LEADER_ADDRESS": "m-0.m.default", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3"}
SLURM = {
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_NODELIST": "node[007-009,012],big1",
    "SLURM_STEP_NUM_NODES": "5",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "2",
}
TPU = {"TPU_WORKER_HOSTNAMES": "t-0.svc,t-1.svc", "TPU_WORKER_ID": "1"}
AUTO = ("--coordinator", "auto")


def read(*argv: str, **environ: str) -> Settings:
    return read_settings(argv, read_environment(None, environ))


def place(settings: Settings) -> tuple[str, int, int | None]:
    return settings.coordinator, settings.num_hosts, settings.host_id


def test_one_host_needs_no_place() -> None:
    assert place(read()) == ("", 1, None)


def test_a_place_is_given_by_flags_or_by_our_own_variables() -> None:
    flags = ("--coordinator", "10.0.0.1:8890", "--num-hosts", "2", "--host-id", "1")
    variables = {
        "LEVSERVE_COORDINATOR": "10.0.0.1:8890",
        "LEVSERVE_NUM_HOSTS": "2",
        "LEVSERVE_HOST_ID": "1",
    }
    assert place(read(*flags)) == place(read(**variables)) == ("10.0.0.1:8890", 2, 1)


def test_another_hosts_own_port_may_be_one_of_host_0() -> None:
    place = ("--num-hosts", "2", "--coordinator", "a:7999")
    assert read(*place, "--host-id", "1").port == 8000
    assert read(*place, "--host-id", "0", "--port", "8001").port == 8001


def test_a_group_of_one_host_is_a_server_as_any_other() -> None:
    assert place(read("--coordinator", "a:1", "--num-hosts", "1", "--host-id", "0")) == ("a:1", 1, 0)


@pytest.mark.parametrize(
    "variables, expected",
    [
        (LWS, (f"m-0.m.default:{PORT}", 4, 3)),
        (SLURM, (f"node007:{61440 + 2 * (70001 % 2048)}", 5, 2)),
        (SLURM | {"SLURM_STEP_NODELIST": "a1,b2", "SLURM_JOB_ID": "2047"}, ("a1:65534", 5, 2)),
        (SLURM | {"SLURM_STEP_NODELIST": "alone"}, (f"alone:{61440 + 2 * (70001 % 2048)}", 5, 2)),
        (TPU, (f"t-0.svc:{PORT}", 2, 1)),
    ],
)
def test_a_cluster_says_which_host_this_is(variables: dict[str, str], expected: tuple[str, int, int]) -> None:
    settings = read(*AUTO, **variables)
    assert place(settings) == expected
    assert any(f"host {expected[2]} of {expected[1]}" in note for note in settings.notes)


def test_what_is_given_beside_auto_counts_more() -> None:
    assert place(read(*AUTO, "--host-id", "0", **LWS)) == (f"m-0.m.default:{PORT}", 4, 0)


def test_variables_of_a_cluster_change_nothing_unless_they_are_asked_for() -> None:
    """Several servers of one job may each serve a different model."""
    assert place(read(**SLURM, **LWS)) == ("", 1, None)


@pytest.mark.parametrize(
    "argv, variables, sentence",
    [
        (("--num-hosts", "2"), {}, "needs --coordinator host:port"),
        (("--coordinator", "a:1"), {}, "needs --num-hosts"),
        (("--coordinator", "a:1", "--num-hosts", "2"), {}, "needs --host-id, from 0 to 1"),
        (("--host-id", "1"), {}, "must be below --num-hosts 1"),
        (
            ("--coordinator", "a:1", "--num-hosts", "2", "--host-id", "0", "--draft-model", "b"),
            {},
            "excludes --draft-model",
        ),
        (("--num-hosts", "0"), {}, "--num-hosts must be an integer from 1"),
        (("--num-hosts", "2", "--host-id", "2", "--coordinator", "a:1"), {}, "hosts are counted from 0"),
        (("--num-hosts", "2", "--host-id", "0", "--coordinator", "a"), {}, "must be host:port"),
        (("--num-hosts", "2", "--host-id", "0", "--coordinator", "a:65535"), {}, "1 to 65534"),
        (("--num-hosts", "2", "--host-id", "0", "--coordinator", "::1:80"), {}, "must be host:port"),
        (
            ("--num-hosts", "2", "--host-id", "0", "--coordinator", "a:7999"),
            {},
            r"--coordinator a:7999 .* takes the ports 7999 and 8000 of host 0, so --port 8000 \(default\) must",
        ),
        (
            ("--num-hosts", "2", "--host-id", "0", "--coordinator", "a:8000"),
            {},
            "takes the ports 8000 and 8001",
        ),
        (AUTO, {}, "no variables of LeaderWorkerSet, SLURM or a TPU pod are set"),
        (AUTO, LWS | {"LWS_GROUP_SIZE": "many"}, "LWS_LEADER_ADDRESS is set, but"),
        (AUTO, {"SLURM_STEP_NODELIST": "a"}, "SLURM_STEP_NODELIST is set, but"),
        (AUTO, SLURM | {"SLURM_NTASKS": "10"}, "10 tasks on 5 nodes"),
        (AUTO, TPU | {"MEGASCALE_NUM_SLICES": "2"}, "several slices"),
        ((*AUTO, "--lazy", "true"), LWS, "serves one model from the start and excludes --lazy true"),
        ((*AUTO, "--models-dir", "/m"), LWS, "excludes --models-dir /m"),
        ((*AUTO, "--dry-run"), LWS, "--dry-run tries a model on one host alone"),
    ],
)
def test_a_place_that_cannot_be_is_refused_in_a_sentence(
    argv: tuple[str, ...], variables: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(*argv, **variables)


def test_several_hosts_do_not_serve_several_models(tmp_path: Path) -> None:
    file = tmp_path / "levserve.ini"
    file.write_text("[model.a]\nmodel = /a\n")
    with pytest.raises(ConfigError, match="serves one model, and the settings file has sections for several"):
        read(*AUTO, "--config", str(file), **LWS)


@pytest.mark.parametrize("given, count", [((), 0), (("--tensor-parallel", "8"), 8)])
def test_the_devices_of_all_hosts_share_the_model(given: tuple[str, ...], count: int) -> None:
    assert read(*AUTO, *given, **LWS).tensor_parallel == count


def test_every_host_has_as_many_of_the_devices() -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel 6 .* must be a multiple of --num-hosts 4"):
        read(*AUTO, "--tensor-parallel", "6", **LWS)


def test_an_ipv6_address_is_in_brackets() -> None:
    assert split_address("[fd00::1]:8890") == ("fd00::1", 8890)


class Metadata(BaseHTTPRequestHandler):
    """Answers as Google's metadata server does on a TPU machine."""

    attributes = {"agent-worker-number": "1", "worker-network-endpoints": "a:b:10.0.0.7,c:d:10.0.0.8"}

    def do_GET(self) -> None:
        found = self.attributes.get(self.path.rpartition("/")[2])
        is_known = found is not None and self.headers["Metadata-Flavor"] == "Google"
        self.send_response(200 if is_known else 404)
        self.end_headers()
        self.wfile.write((found or "").encode())

    def log_message(self, *given: object) -> None: ...


@pytest.fixture
def metadata_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_tpu_machine_without_variables_is_found_in_its_metadata(metadata_server: str) -> None:
    assert place(read(*AUTO, GCE_METADATA_IP=metadata_server)) == (f"10.0.0.7:{PORT}", 2, 1)


def test_a_metadata_server_that_knows_nothing_is_named(
    metadata_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Metadata, "attributes", {})
    with pytest.raises(ConfigError, match=f"the metadata server {metadata_server} does not know"):
        read(*AUTO, GCE_METADATA_IP=metadata_server)
