"""What machine code is written for: a CPU, the instructions it has, and the width of its vectors.

`detect_target` describes the CPU that the process runs on; nothing else asks what that CPU can do when
kernels are chosen or written. The named targets let one machine write the code of others, and run it where it
has their instructions.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from dataclasses import dataclass

import llvmlite.binding as llvm

AT_HWCAP, HWCAP_ASIMDDP = 16, 1 << 20
"""Linux: the entry of a process' auxiliary vector that lists an ARM CPU's features, and the bit of its int8
dot products."""
X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
AVX2 = ("avx", "avx2", "f16c", "fma")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512vnni")


@dataclass(frozen=True)
class Target:
    """A CPU to write code for. Two targets are equal exactly if the same code is right for both."""

    triple: str
    cpu: str
    features: str
    """In LLVM's words: "+avx2,-sve"."""
    vector_bytes: int
    """What kernels take for the width of a register; LLVM splits wider vectors, so any width runs on any
    CPU."""

    @staticmethod
    def named(name: str) -> Target:
        """One that does not depend on this CPU, except that "narrow" is the least of its architecture."""
        is_arm = detect_target().arch == "aarch64"
        known = {
            "narrow": Target(ARM, "generic", "", 16) if is_arm else Target(X86, "x86-64", "", 16),
            "avx2": Target(X86, "x86-64", _spell(AVX2), 32),
            "avx512": Target(X86, "x86-64", _spell(AVX512), 64),
            "neon": Target(ARM, "generic", _spell(("neon", "dotprod")), 16),
        }
        return known[name]

    @property
    def arch(self) -> str:
        return self.triple.partition("-")[0]

    @property
    def name(self) -> str:
        """Part of the name of every kernel: no two targets share it, and one has it in every process."""
        return f"{self.arch}_{8 * self.vector_bytes}_{hashlib.sha256(repr(self).encode()).hexdigest()[:8]}"

    @property
    def lanes(self) -> int:
        """Numbers of 32 bits in a register."""
        return self.vector_bytes // 4

    def has(self, feature: str) -> bool:
        return feature in self._enabled

    @property
    def has_dot_product(self) -> bool:
        """ARM's sum of four products of signed bytes."""
        return self.has("dotprod")

    @property
    def has_vnni(self) -> bool:
        """x86's sum of four products of unsigned with signed bytes, for vectors of some width."""
        return self.has("avx512vnni") or self.has("avxvnni")

    @property
    def has_amx_bf16(self) -> bool:
        """Matrix units that multiply bfloat16."""
        return self.has("amx-bf16")

    def runs_on(self, host: Target) -> bool:
        """Whether code for this target may be called there."""
        return self == host or (self.arch == host.arch and self._is_within(host))

    def _is_within(self, host: Target) -> bool:
        is_generic = self.cpu in ("generic", "x86-64")  # which has no features beyond those listed
        return (is_generic or self.cpu == host.cpu) and self._enabled <= host._enabled

    @property
    def _enabled(self) -> frozenset[str]:
        return frozenset(each[1:] for each in self.features.split(",") if each.startswith("+"))


@functools.cache
def detect_target() -> Target:
    """The CPU that this process runs on."""
    triple = llvm.get_default_triple()
    found: dict[str, bool] = dict(llvm.get_host_cpu_features())
    if triple.startswith("aarch64"):  # LLVM derives dot products from a CPU's name and does not list them
        libc = ctypes.CDLL(None)
        libc.getauxval.restype, libc.getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
        found["dotprod"] = bool(libc.getauxval(AT_HWCAP) & HWCAP_ASIMDDP)
    features = ",".join(f"{'+' if has else '-'}{name}" for name, has in sorted(found.items()))
    widest = 64 if found.get("avx512vl") else 32 if found.get("avx2") else 16
    return Target(triple, llvm.get_host_cpu_name(), features, widest)


def _spell(features: tuple[str, ...]) -> str:
    return ",".join(f"+{feature}" for feature in features)
