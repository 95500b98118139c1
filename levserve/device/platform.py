"""Sets jax up as the settings ask, finds the device to serve on, and reads its memory.

Called on the thread that loads a model, before anything else looks at jax's devices.
"""

from __future__ import annotations

import jax

from levserve.device.damage import remove_damaged_programs
from levserve.device.distributed import start_distributed
from levserve.device.host import cpu_features, cpu_name, free_memory
from levserve.device.malloc import tune_malloc
from levserve.device.mesh import prepare_cpu_devices
from levserve.device.missing import explain, find_missing
from levserve.errors import StartupError
from levserve.jit.code_cache import CodeCache, open_folder, use_cache
from levserve.observe.health import DeviceMemory, DeviceStatus
from levserve.settings.settings import Settings

PLATFORMS = {"gpu": "cuda,cpu", "rocm": "rocm,cpu", "tpu": "tpu,cpu"}
"""jax's names for them. The CPU is there too: a reload prepares weights on it before they are swapped in."""
MIN_COMPILE_SECONDS = "jax_persistent_cache_min_compile_time_secs"
JAX_MIN_COMPILE_SECONDS = 1.0
"""jax's default, with which it would not keep small programs. Any other value is the user's and is kept."""


def open_device(settings: Settings) -> jax.Device:
    """The device to serve on. Raises `StartupError` without one, or if compiled programs cannot be kept."""
    tune_malloc()
    if settings.device != "auto":
        jax.config.update("jax_platforms", PLATFORMS.get(settings.device, settings.device))
    if settings.dtype == "float32":
        # By default a GPU multiplies float32 with ten bits of mantissa (TF32).
        jax.config.update("jax_default_matmul_precision", "highest")
    prepare_cpu_devices(settings)
    if settings.num_hosts > 1:
        start_distributed(settings)
    if settings.compile_cache:
        _keep_programs(settings)
    if missing := find_missing(settings.device):
        raise StartupError(f"--device {settings.device}: no such device here ({missing})")
    try:
        device = jax.local_devices()[0]
    except RuntimeError as error:
        reason = explain(settings.device, str(error).splitlines()[0])
        raise StartupError(f"--device {settings.device}: no such device here ({reason})") from error
    if settings.device not in ("auto", "cpu") and device.platform == "cpu":
        # If a plugin fails, jax skips its platform in the list and takes the next.
        reason = explain(settings.device, "jax finds only the CPU; is its plugin installed?")
        raise StartupError(f"--device {settings.device}: no such device here ({reason})")
    return device


def kernel_platform(device: jax.Device) -> str:
    """The platform that kernels are chosen for. jax calls AMD's GPUs "gpu" too, but ours are for NVIDIA's."""
    return "rocm" if "rocm" in device.client.platform_version.lower() else device.platform


def free_bytes(*devices: jax.Device) -> int:
    """Bytes that are free now on each of these devices; those that a CPU is divided into share its memory."""
    if devices[0].platform == "cpu":
        return free_memory() // len(devices)
    stats = [device.memory_stats() for device in devices]
    return min(int(each["bytes_limit"] - each["bytes_in_use"]) for each in stats)


def read_status(device: jax.Device) -> DeviceStatus:
    """What other threads may know of the device; only the device thread calls this. Takes microseconds: the
    allocator knows the numbers, so the device is not asked."""
    if device.platform == "cpu":
        return DeviceStatus("cpu", cpu_name(), jax.__version__, None)
    free = free_bytes(device)
    total = int(device.memory_stats()["bytes_limit"])
    return DeviceStatus(device.platform, device.device_kind, jax.__version__, DeviceMemory(total, free))


def _keep_programs(settings: Settings) -> None:
    try:
        folder = open_folder(settings.cache_path / "programs", cpu_features())
    except OSError as error:
        raise StartupError(
            f"the cache folder {settings.cache_path} cannot be written ({error.strerror}): name another one "
            "with --cache-dir, or do without compiled programs on disk with --compile-cache false"
        ) from error
    remove_damaged_programs(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if getattr(jax.config, MIN_COMPILE_SECONDS) == JAX_MIN_COMPILE_SECONDS:
        jax.config.update(MIN_COMPILE_SECONDS, 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    use_cache(CodeCache(folder))
