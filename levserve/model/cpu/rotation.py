"""The rotation of `hadamard` in kernels of a CPU."""

from __future__ import annotations

from levserve.jit.builder import Value


def rotate_block(vectors: list[Value], lanes: int) -> list[Value]:
    """A block of `hadamard.rotate` without its scale: sums and differences at every distance, first within
    the vectors and then between them."""
    distance = 1
    while distance < lanes:
        vectors = [x.multiply_add(x.butterfly_signs(distance), x.swap_lanes(distance)) for x in vectors]
        distance *= 2
    distance = 1
    while distance < len(vectors):
        for low in range(len(vectors)):
            if not low & distance:
                first, second = vectors[low], vectors[low | distance]
                vectors[low], vectors[low | distance] = first + second, first - second
        distance *= 2
    return vectors
