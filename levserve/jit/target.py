"""The CPU that machine code is written for: its architecture, its instructions and the width of its vectors.

`detect_target` describes the CPU that this process runs on. This description alone decides which kernels are
used and how they are written. Named targets let a machine compile code for other CPUs, and run that code if
it has their instructions.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
from dataclasses import dataclass, replace

import llvmlite.binding as llvm

log = logging.getLogger(__name__)

AT_HWCAP, HWCAP_ASIMDDP = 16, 1 << 20
"""The entry of Linux' auxiliary vector that lists an ARM CPU's features; the bit of int8 dot products."""
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
"""Linux' system call with which an x86 process requests the AMX registers, and its arguments."""
X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
AVX2 = ("avx", "avx2", "f16c", "fma")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512vnni")
AMX = ("amx-bf16", "amx-int8", "amx-tile")


@dataclass(frozen=True)
class Target:
    """A CPU to write code for. Two targets are equal exactly if the same code is right for both."""

    triple: str
    cpu: str
    features: str
    """As LLVM writes them: "+avx2,-sve"."""
    vector_bytes: int
    """The register width that kernels are written for; LLVM splits wider vectors, so any width runs."""

    @staticmethod
    def named(name: str) -> Target:
        """A target for any machine; "narrow" is the baseline of this machine's architecture."""
        is_arm = detect_target().arch == "aarch64"
        known = {
            "narrow": Target(ARM, "generic", "", 16) if is_arm else Target(X86, "x86-64", "", 16),
            "avx2": Target(X86, "x86-64", _spell(AVX2), 32),
            "avx512": Target(X86, "x86-64", _spell(AVX512), 64),
            "amx": Target(X86, "x86-64", _spell((*AVX512, *AMX)), 64),
            "neon": Target(ARM, "generic", _spell(("neon", "dotprod")), 16),
        }
        return known[name]

    @property
    def arch(self) -> str:
        return self.triple.partition("-")[0]

    @property
    def name(self) -> str:
        """Part of every kernel's name: unique to this target, and the same in every process."""
        return f"{self.arch}_{8 * self.vector_bytes}_{hashlib.sha256(repr(self).encode()).hexdigest()[:8]}"

    @property
    def lanes(self) -> int:
        """How many 32-bit elements a register holds."""
        return self.vector_bytes // 4

    def has(self, feature: str) -> bool:
        return feature in self._enabled

    @property
    def has_dot_product(self) -> bool:
        """Whether ARM can sum four products of signed bytes."""
        return self.has("dotprod")

    @property
    def has_vnni(self) -> bool:
        """Whether x86 can sum four products of unsigned with signed bytes, for vectors of some width."""
        return self.has("avx512vnni") or self.has("avxvnni")

    @property
    def has_amx_bf16(self) -> bool:
        """Whether there are matrix units for bfloat16."""
        return self.has("amx-tile") and self.has("amx-bf16")

    @property
    def has_amx_int8(self) -> bool:
        """Whether there are matrix units for int8."""
        return self.has("amx-tile") and self.has("amx-int8")

    def without(self, *features: str) -> Target:
        """The same CPU as if it had none of these features."""
        kept = (f"-{each[1:]}" if each[1:] in features else each for each in self.features.split(","))
        return replace(self, features=",".join(kept))

    def runs_on(self, host: Target) -> bool:
        """Whether the host's CPU can run code for this target."""
        if self == host:
            return True
        is_generic = self.cpu in ("generic", "x86-64")  # such a CPU has only the features that are listed
        is_same_kind = self.arch == host.arch and (is_generic or self.cpu == host.cpu)
        return is_same_kind and self._enabled <= host._enabled

    @property
    def _enabled(self) -> frozenset[str]:
        return frozenset(name[1:] for name in self.features.split(",") if name.startswith("+"))


@functools.cache
def detect_target() -> Target:
    """The CPU that this process runs on."""
    triple = llvm.get_default_triple()
    found: dict[str, bool] = dict(llvm.get_host_cpu_features())
    if triple.startswith("aarch64"):  # LLVM infers dot products from the CPU's name and does not list them
        libc = ctypes.CDLL(None)
        libc.getauxval.restype, libc.getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
        found["dotprod"] = bool(libc.getauxval(AT_HWCAP) & HWCAP_ASIMDDP)
    if found.get("amx-tile") and (reason := _refused_tiles()) is not None:
        log.warning("AMX is not used: %s", reason)
        found |= dict.fromkeys(AMX, False)
    features = ",".join(f"{'+' if has else '-'}{name}" for name, has in sorted(found.items()))
    widest = 64 if found.get("avx512vl") else 32 if found.get("avx2") else 16
    return Target(triple, llvm.get_host_cpu_name(), features, widest)


def _refused_tiles() -> str | None:
    """Requests the tile registers for all threads of this process; why Linux refuses them, or None."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    if libc.syscall(*map(ctypes.c_long, (ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA))) == 0:
        return None
    return f"Linux denied access to the tile registers: {os.strerror(ctypes.get_errno())}"


def _spell(features: tuple[str, ...]) -> str:
    return ",".join(f"+{feature}" for feature in features)
