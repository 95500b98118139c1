"""The container files: Dockerfile, lock files, compose, scripts that run an image, its health check."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import yaml
from packaging.requirements import Requirement

from levserve.settings.parse import parse_settings
from levserve.settings.settings import BY_KEY
from levserve.weights.bundled import SMOLLM2
from tests.documents import ROOT
from tests.fake_server import ServerProcess

DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
SCRIPTS = ROOT / "deploy" / "scripts"
EXIT_SECONDS = 10  # levserve exits at most this long after its drain

LOCKED = re.compile(
    r"^([a-z0-9-]+)==(\S+)(?: ; (.+?))? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n?)+)", re.MULTILINE
)
"""Matches one package of a lock file: name, version, marker, hashes."""
TARGETS = {"base": ("gcs", "s3", "otel"), "cuda": ("cuda13",), "cuda12": ("cuda12",), "tpu": ("tpu",)}
"""The extras that each lock file is made for; `base` also has levserve's own requirements."""
ENVIRONMENTS = [
    {
        "python_version": version,
        "python_full_version": f"{version}.1",
        "sys_platform": "linux",
        "platform_machine": machine,
    }
    for version in ("3.11", "3.12")
    for machine in ("x86_64", "aarch64")
]


class Locked(NamedTuple):
    """One version of a package in a lock file, where its marker holds."""

    requirement: Requirement
    version: str


def read_lock(name: str) -> list[Locked]:
    text = (DOCKER / "locks" / f"{name}.txt").read_text()
    found = []
    for package, version, marker, _ in LOCKED.findall(text):
        requirement = f"{package}=={version}" + (f" ; {marker}" if marker else "")
        found.append(Locked(Requirement(requirement), version))
    assert len(found) == len(re.findall(r"^[a-z]", text, re.MULTILINE)), (
        "each entry is one version with its hashes"
    )
    return found


def required(section: str, key: str) -> list[Requirement]:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    return [Requirement(line) for line in config[section][key].strip().splitlines() if line]


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("target", TARGETS)
def test_a_lock_file_covers_what_setup_cfg_requires(target: str) -> None:
    wanted = [
        requirement for extra in TARGETS[target] for requirement in required("options.extras_require", extra)
    ]
    if target == "base":
        wanted += required("options", "install_requires")
    locked = [*read_lock("base"), *read_lock(target)]
    for environment in ENVIRONMENTS:
        versions = {
            plain(entry.requirement.name): entry.version
            for entry in locked
            if entry.requirement.marker is None or entry.requirement.marker.evaluate(environment)
        }
        for requirement in wanted:
            if requirement.marker is None or requirement.marker.evaluate(environment):
                version = versions.get(plain(requirement.name))
                assert version is not None, f"{requirement} is not locked: run deploy/docker/lock.sh"
                is_covered = requirement.specifier.contains(version, prereleases=True)
                assert is_covered, f"{requirement} is locked at {version}: run deploy/docker/lock.sh"


@pytest.mark.parametrize(
    ("target", "package"), [("cuda", "jax-cuda13-plugin"), ("cuda12", "jax-cuda12-plugin"), ("tpu", "libtpu")]
)
def test_a_targets_lock_file_adds_its_device_and_repeats_nothing(target: str, package: str) -> None:
    names = {entry.requirement.name for entry in read_lock(target)}
    assert package in names
    assert not names & {entry.requirement.name for entry in read_lock("base")}


def test_the_builder_is_locked_as_pyproject_asks() -> None:
    asked = re.search(r'requires = \["(.+)"\]', (ROOT / "pyproject.toml").read_text())
    assert asked is not None
    requirement = Requirement(asked[1])
    (locked,) = read_lock("build")
    assert locked.requirement.name == requirement.name and requirement.specifier.contains(locked.version)
    assert f"echo '{asked[1]}'" in (DOCKER / "lock.sh").read_text()


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    result = subprocess.run(
        [hadolint, "--failure-threshold", "style", DOCKER / "Dockerfile"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_dockerfile_has_the_targets_that_are_documented_and_cpu_is_the_default() -> None:
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    assert {"cpu", "cpu-model", "cuda", "cuda12", "tpu"} <= {name for _, name in stages}
    assert stages[-1] == ("cpu", "default")


def test_an_image_runs_as_a_user_that_may_write_to_its_cache_alone() -> None:
    assert "USER 10001:0" in DOCKERFILE and "VOLUME /var/cache/levserve" in DOCKERFILE
    assert "--uid 10001" in DOCKERFILE and "install -d -o 10001" in DOCKERFILE
    assert f"LEVSERVE_MODEL=/opt/models/{SMOLLM2.name}.gguf" in DOCKERFILE, (
        "requests use the bundled model's name"
    )


def test_variables_of_the_images_are_settings() -> None:
    variables = {setting.variable for setting in BY_KEY.values()}
    assert set(re.findall(r"\bLEVSERVE_[A-Z_]+", DOCKERFILE)) <= variables
    assert "LEVSERVE_PORT" not in DOCKERFILE, "it would win over PORT"


def test_everything_that_is_copied_is_sent_to_the_builder() -> None:
    """The ignore file lists what may be sent, so that a secret in the checkout is never sent."""
    lines = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    sent = {line[1:] for line in lines if line.startswith("!")}
    copied = set()
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE):
        copied |= set(sources.split())
    assert all((ROOT / name).exists() for name in sent)
    for name in copied:
        parts = [name, *(str(parent) for parent in Path(name).parents)]
        assert sent & set(parts), f"{name} is ignored"


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_compose_mounts_files_that_exist_and_builds_a_target_that_exists() -> None:
    compose = read_yaml(DOCKER / "compose.yaml")
    volumes = compose["volumes"].keys()
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert source in volumes or (DOCKER / source).exists(), volume
    for file in (compose, read_yaml(DOCKER / "compose.cuda.yaml")):
        levserve = file["services"]["levserve"]
        assert levserve["image"] == f"levserve:{levserve['build']['target']}"
        assert f"AS {levserve['build']['target']}\n" in DOCKERFILE
    build = compose["services"]["levserve"]["build"]
    assert (DOCKER / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]).exists()


def test_composes_server_drains_before_it_is_killed_and_nginx_with_it() -> None:
    """nginx ends its streams too before it exits, and compose stops it before the server it depends on."""
    services = read_yaml(DOCKER / "compose.yaml")["services"]
    for name in ("levserve", "nginx"):
        grace_seconds = int(services[name]["stop_grace_period"].removesuffix("s"))
        assert grace_seconds > BY_KEY["drain-seconds"].default + EXIT_SECONDS, name
    assert services["levserve"]["read_only"] is True


def test_composes_server_listens_where_its_neighbours_look_whatever_the_env_file_says() -> None:
    """One .env file may be for run.sh as well, which takes PORT from it."""
    services = read_yaml(DOCKER / "compose.yaml")["services"]
    given = dict(line.partition("=")[::2] for line in services["levserve"]["environment"])
    (job,) = read_yaml(DOCKER / "prometheus.yml")["scrape_configs"]
    file = {"PORT": "9001", "LEVSERVE_PORT": "9002", "LEVSERVE_HOST": "127.0.0.1"}
    places = {name: value for name, value in given.items() if name in ("LEVSERVE_HOST", "LEVSERVE_PORT")}
    settings = parse_settings([], file | places)
    assert settings.host == "0.0.0.0"
    assert job["static_configs"] == [{"targets": [f"levserve:{settings.port}"]}]


def test_composes_services_all_come_back_after_a_reboot() -> None:
    """With on-failure, Docker would start the others again but not the server, which a reboot ends with 0."""
    services = read_yaml(DOCKER / "compose.yaml")["services"]
    assert {service["restart"] for service in services.values()} == {"unless-stopped"}


def test_compose_points_nginx_prometheus_and_grafana_at_their_neighbours() -> None:
    services = read_yaml(DOCKER / "compose.yaml")["services"]
    here, there = re.search(r"sed s/(\S+)/(\S+)/", services["nginx"]["command"][2]).groups()
    assert (ROOT / "deploy" / "nginx" / "levserve.conf").read_text().count(f"server {here};") == 1
    (job,) = read_yaml(DOCKER / "prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": [there]}] and there.partition(":")[0] in services
    (source,) = read_yaml(DOCKER / "grafana" / "datasources.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]


def test_grafana_finds_the_dashboard() -> None:
    grafana = read_yaml(DOCKER / "compose.yaml")["services"]["grafana"]
    mounts = dict(reversed(volume.removesuffix(":ro").split(":")) for volume in grafana["volumes"])
    (provider,) = read_yaml(DOCKER / "grafana" / "dashboards.yaml")["providers"]
    folder = DOCKER / mounts[provider["options"]["path"]]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert json.loads((folder / home.name).read_text())["title"] == "levserve"


class Engine:
    """A fake docker and podman that record their calls; the image exists unless `NO_IMAGE` is set."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        bin = folder / "bin"
        bin.mkdir()
        for name in ("docker", "podman"):
            script = f'#!/bin/sh\nprintf "%s\\n" {name} "$@" >> {self.calls}\necho >> {self.calls}\n'
            (bin / name).write_text(script + '[ "$2" != inspect ] || [ -z "$NO_IMAGE" ]\n')
            (bin / name).chmod(0o755)
        self.environ = {"PATH": f"{bin}:/usr/bin:/bin"}

    def run(self, *words: str, **environ: str) -> list[list[str]]:
        """Runs the script, and returns each call of the engine as its words."""
        self.calls.unlink(missing_ok=True)
        result = subprocess.run(
            [SCRIPTS / "run.sh", *words],
            cwd=self.folder,
            env=self.environ | environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        return [call.split("\n") for call in self.calls.read_text().strip().split("\n\n")]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def test_the_script_runs_the_cpus_image_with_a_read_only_root(engine: Engine) -> None:
    _, run = engine.run()
    assert run[:2] == ["docker", "run"] and run[-1] == "levserve:cpu"
    assert (
        "--read-only" in run and "127.0.0.1:8000:8000" in run and "levserve-cache:/var/cache/levserve" in run
    )
    assert int(run[run.index("--stop-timeout") + 1]) > BY_KEY["drain-seconds"].default + EXIT_SECONDS


def test_the_script_hands_flags_variables_and_the_env_file_on(engine: Engine) -> None:
    (engine.folder / ".env").write_text("PORT=9001\n")
    _, run = engine.run(
        "--model", "org/name", "--max-running", "8", LEVSERVE_API_KEY="secret", HF_TOKEN="token", OTHER="x"
    )
    assert run[-5:] == ["levserve:cpu", "--model", "org/name", "--max-running", "8"]
    assert {"LEVSERVE_API_KEY", "HF_TOKEN", "LEVSERVE_PORT=8000"} <= set(run) and "OTHER" not in run
    assert "secret" not in run, "a value would be seen in the list of processes"
    assert "--env-file" in run and "127.0.0.1:9001:8000" in run


def test_the_script_lets_the_shells_port_win_and_mounts_models(engine: Engine) -> None:
    (engine.folder / ".env").write_text("PORT=9001\n")
    (engine.folder / "mine").mkdir()
    _, run = engine.run("cpu", PORT="9002", ADDRESS="0.0.0.0", MODELS="mine")
    assert "0.0.0.0:9002:8000" in run and f"{engine.folder}/mine:/models:ro" in run


@pytest.mark.parametrize(
    ("engine_name", "options"),
    [("docker", ["--gpus", "all"]), ("podman", ["--device", "nvidia.com/gpu=all"])],
)
def test_the_script_gives_the_gpus_to_the_targets_for_them(
    engine: Engine, engine_name: str, options: list[str]
) -> None:
    for target in ("cuda", "cuda12"):
        _, run = engine.run(target, ENGINE=engine_name)
        assert run[0] == engine_name and run[-3:] == [*options, f"levserve:{target}"]


def test_the_script_builds_an_image_that_is_missing(engine: Engine) -> None:
    _, build, run = engine.run("tpu", NO_IMAGE="1", ENGINE="podman")
    assert build[1:4] == ["build", "-f", str(DOCKER / "Dockerfile")] and build[-1] == str(ROOT)
    assert build[build.index("--target") + 1] == "tpu" and build[build.index("--format") + 1] == "docker"
    assert run[-1] == "levserve:tpu"


def test_the_script_refuses_an_unknown_target_by_name(engine: Engine) -> None:
    result = subprocess.run([SCRIPTS / "run.sh", "gpu"], env=engine.environ, capture_output=True, text=True)
    assert result.returncode == 2 and "'gpu'" in result.stderr and "cuda" in result.stderr


def test_both_scripts_take_the_same_variables_and_pass_the_same_options() -> None:
    shell, power = ((SCRIPTS / name).read_text() for name in ("run.sh", "run.ps1"))
    for words in ("PORT", "ADDRESS", "MODELS", "IMAGE", "ENGINE"):
        assert re.search(rf"\${{{words}[:}}]", shell) and f"$env:{words}" in power
    options = set(re.findall(r"(?<![\w-])--[a-z-]+", shell)) - {"--model"}
    assert options == set(re.findall(r"(?<![\w-])--[a-z-]+", power)) - {"--model"}


def test_shell_scripts_have_no_syntax_error_and_can_be_run() -> None:
    for path in (SCRIPTS / "run.sh", DOCKER / "lock.sh"):
        assert os.access(path, os.X_OK)
        assert subprocess.run([shutil.which("bash") or "bash", "-n", path]).returncode == 0


@pytest.fixture(scope="module")
def healthcheck() -> ModuleType:
    spec = importlib.util.spec_from_file_location("healthcheck", DOCKER / "healthcheck.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess().wait_ready() as server:
        yield server


def port_of(server: ServerProcess) -> str:
    return server.url.rpartition(":")[2]


@pytest.mark.parametrize("before", [["/opt/python"], ["/sbin/docker-init", "--"], ["/opt/python", "-m"]])
def test_the_health_check_finds_the_port_among_the_flags(
    before: list[str], healthcheck: ModuleType, server: ServerProcess, tmp_path: Path
) -> None:
    words = [*before, "/opt/levserve/bin/levserve", "--host", "0.0.0.0", "--port", port_of(server)]
    (tmp_path / "cmdline").write_text("".join(f"{word}\0" for word in words))
    assert healthcheck.main(tmp_path) == 0


def test_the_health_check_finds_the_port_in_the_environment(
    healthcheck: ModuleType, server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEVSERVE_PORT", port_of(server))
    (tmp_path / "cmdline").write_text("sh\0-c\0something else\0")
    assert healthcheck.main(tmp_path) == 0


def test_the_health_check_fails_while_a_server_loads_and_where_there_is_none(
    healthcheck: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ServerProcess("--served-model-name", "endless") as server:
        server.log.wait_for(lambda line: "listening on " in line)
        (tmp_path / "cmdline").write_text(f"levserve\0--port\0{port_of(server)}\0")
        assert healthcheck.main(tmp_path) == 1
        assert "loading" in capsys.readouterr().out
    assert healthcheck.main(tmp_path) == 1
    assert "no answer" in capsys.readouterr().out
