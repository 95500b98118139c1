"""The container image as a user would build and run it: read-only, not as root, stopped by a signal.

Slow: it builds the image. Run it with `pytest -m slow tests/real/test_images.py`, where buildah and podman
are installed.
"""

from __future__ import annotations

import json
import subprocess
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from tests.images import Container, build_image, podman, running_container

pytestmark = [pytest.mark.slow, pytest.mark.podman]

IMAGE = "localhost/levserve-test:cpu-model"


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    build_image("cpu-model", IMAGE)
    yield IMAGE
    podman("rmi", "--force", IMAGE)


@pytest.fixture(scope="module")
def options() -> Iterator[tuple[str, ...]]:
    """Options of a container as it is meant to be run: it can only write to a cache that outlives it."""
    volume = podman("volume", "create")
    # As Docker does: by default, podman would let it write to /tmp.
    yield ("--read-only", "--read-only-tmpfs=false", "--volume", f"{volume}:/var/cache/levserve")
    podman("volume", "rm", volume)


@pytest.fixture(scope="module")
def container(image: str, options: tuple[str, ...]) -> Iterator[Container]:
    with running_container(image, *options) as container:
        container.wait_ready()
        yield container


def complete(container: Container, **fields: object) -> str:
    """The body of an answer to a prompt."""
    body = {"model": "smollm2-135m", "prompt": "The capital of France is", "temperature": 0, **fields}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{container.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return response.read().decode()


def test_curl_gets_an_answer_from_the_model_in_the_image(container: Container) -> None:
    body = (
        '{"model": "smollm2-135m", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 4}'
    )
    command = [
        "curl",
        "-sf",
        f"{container.url}/v1/completions",
        "-H",
        "Content-Type: application/json",
        "-d",
        body,
    ]
    answer = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert "Paris" in answer["choices"][0]["text"]


def test_it_runs_as_a_user_with_a_read_only_root(container: Container) -> None:
    assert container.run("id", "-u").stdout == "10001\n"
    for folder in ("/", "/tmp", "/opt/levserve", "/srv"):
        assert container.run("touch", f"{folder}/file").returncode != 0, folder
    assert container.run("touch", "/var/cache/levserve/file").returncode == 0


def test_the_health_check_of_the_image_passes(container: Container) -> None:
    check = subprocess.run(["podman", "healthcheck", "run", container.id], capture_output=True, text=True)
    assert check.returncode == 0, check.stderr
    last = json.loads(container.inspect("{{json .State.Health.Log}}"))[-1]
    assert last["ExitCode"] == 0


def test_sigterm_lets_a_stream_end_and_the_exit_code_is_0(image: str, options: tuple[str, ...]) -> None:
    with running_container(image, *options, "--env", "LEVSERVE_DRAIN_SECONDS=120") as container:
        container.wait_ready()
        answers: list[str] = []
        client = threading.Thread(
            target=lambda: answers.append(complete(container, max_tokens=100, ignore_eos=True, stream=True))
        )
        client.start()
        while "levserve_requests_running 1.0" not in metrics_of(container):
            assert client.is_alive()
        podman("kill", "--signal", "TERM", container.id)
        assert container.wait_exit() == 0, container.log
        client.join()
    assert answers[0].count("data: ") > 2 and answers[0].endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in answers[0]


def metrics_of(container: Container) -> str:
    with urllib.request.urlopen(f"{container.url}/metrics", timeout=10) as response:
        return response.read().decode()


def test_a_mistake_in_a_setting_ends_the_container_with_code_2(image: str) -> None:
    with running_container(image, "--env", "LEVSERVE_MAX_RUNNING=many") as container:
        assert container.wait_exit() == 2
        assert "LEVSERVE_MAX_RUNNING" in container.log
